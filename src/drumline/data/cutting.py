"""Documents that cannot stay whole: the end of a text is held out, or one is too long to be encoded at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drumline.data.corpus import Labelled, utf8_bytes
from drumline.data.text_files import Document

BREAK_CHARS = 100
"""How far before the wanted place a cut may move to fall between two words."""


def split_at(whole: Iterable[Document], cut_bytes: int) -> Iterator[Labelled]:
    """Train on the first `cut_bytes` of the text, a few less where that spares a word, and hold out the rest."""
    left_bytes = cut_bytes
    for document in whole:
        size_bytes = utf8_bytes(document.text)
        if size_bytes <= left_bytes:
            yield "train", document
        elif left_bytes <= 0:
            yield "valid", document
        else:
            end = len(document.text.encode()[:left_bytes].decode(errors="ignore"))
            space = document.text.rfind(" ", max(1, end - BREAK_CHARS), end)
            end = space if space > 0 else end
            if end:
                yield "train", Document(document.name, document.text[:end])
            yield "valid", Document(document.name, document.text[end:])
        left_bytes -= size_bytes


def parts(document: Document, *, longest_bytes: int) -> Iterator[Document]:
    """Parts of a document that is too long, numbered from 1."""
    most_chars = len(document.text) * longest_bytes // utf8_bytes(document.text)
    start = number = 0
    while start < len(document.text):
        number += 1
        end = start + most_chars
        if end < len(document.text):
            end = document.text.rfind("\n", start, end) + 1 or end
        yield Document(f"{document.name}#{number}", document.text[start:end])
        start = end
