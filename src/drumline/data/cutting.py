"""Splitting text: to hold out its end, or because a document is too long to read or encode at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

from drumline.data.corpus import Labelled, utf8_bytes
from drumline.data.text_files import PART_BYTES, Document

LONGEST_LINE_BYTES = 4 << 20
"""A longer line is split between two characters."""
BREAK_CHARS = 100
"""How far before the target a split may move to fall between two words."""


def split_at(whole: Iterable[Document], cut_bytes: int) -> Iterator[Labelled]:
    """Train on the first `cut_bytes` of the text, slightly less to avoid splitting a word, and hold out the rest."""
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


def cut_plain(beginning: bytes, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Parts that end at a line end, numbered from 1; a text that needs no split is one part with number 0.

    beginning: what was already read from the stream
    """
    number, buffer, ended = 0, beginning, False
    del beginning
    while not ended:
        while len(buffer) > PART_BYTES:
            cut = buffer.rfind(b"\n", 0, PART_BYTES) + 1 or buffer.find(b"\n", PART_BYTES, LONGEST_LINE_BYTES) + 1
            if not cut and len(buffer) > LONGEST_LINE_BYTES:
                cut = LONGEST_LINE_BYTES
                while cut > LONGEST_LINE_BYTES - 3 and buffer[cut] & 0xC0 == 0x80:  # inside a character
                    cut -= 1
            if cut in (0, len(buffer)):  # no line end yet, or possibly the end of the file
                break
            number += 1
            yield number, buffer[:cut]
            buffer = buffer[cut:]
        block = stream.read(PART_BYTES)
        buffer, ended = buffer + block, not block
    if buffer or not number:
        yield (number + 1 if number else 0), buffer
