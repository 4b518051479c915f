"""Splitting text: to hold out its end, or because a document is too long to read or encode at once.

Parts of a document stay one document in the data: `Document.more` says that the next one continues it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import AnyStr, BinaryIO

from drumline.data.corpus import Labelled, utf8_bytes
from drumline.data.sources import PART_BYTES, Document, Reading, Skipped, decoded
from drumline.data.tokens import MANIFEST, Manifest, split_files
from drumline.errors import DataError

LONGEST_LINE_BYTES = 4 << 20
"""A longer line is split between two characters."""
BREAK_CHARS = 100
"""How far before the target a split may move to fall between two words."""
MOST_TRIES = 1000
"""How many line ends, and then spaces, are tried for a split that changes no tokens."""


def split_at(whole: Iterable[Document], cut_bytes: int, skipped: Skipped | None = None) -> Iterator[Labelled]:
    """Train on the first `cut_bytes` of the text, slightly less to avoid splitting a word, and hold out the rest.

    skipped: where it is noted, for users
    """
    if skipped is not None:
        skipped.note += "; the end of the text is held out for validation"
    left_bytes = cut_bytes
    last: Document | None = None  # of the training data; if nothing follows there, it is its document's end
    for document in whole:
        size_bytes = utf8_bytes(document.text)
        if left_bytes > 0 and size_bytes > left_bytes:
            end = len(document.text.encode()[:left_bytes].decode(errors="ignore"))
            space = document.text.rfind(" ", max(1, end - BREAK_CHARS), end)
            end = space if space > 0 else end
            if last is not None:
                yield "train", replace(last, more=last.more and end > 0)
            last = None
            if end:
                yield "train", Document(document.name, document.text[:end])
            yield "valid", Document(document.name, document.text[end:], document.more)
        elif left_bytes > 0:
            if last is not None:
                yield "train", last
            last = document
        else:
            if last is not None:
                yield "train", replace(last, more=False)
            last = None
            yield "valid", document
        left_bytes -= size_bytes
    if last is not None:
        yield "train", last


def parts(document: Document, *, longest_bytes: int) -> Iterator[Document]:
    """A document that is too long to encode at once, in parts."""
    text = document.text
    most_chars = max(1, len(text) * longest_bytes // utf8_bytes(text))
    start = 0
    while len(text) - start > most_chars:
        end = start + most_chars
        end = _word_end(text, start, end, breaks=("\n", " ")) or text.rfind("\n", start, end) + 1 or end
        yield Document(document.name, text[start:end], more=True)
        start = end
    yield Document(document.name, text[start:], more=document.more)


def read_parts(beginning: bytes, stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[Document]:
    """A long plain text as one document, in parts.

    beginning: what was already read from the stream
    """
    line, offset, begun = 1, 0, False
    try:
        for more, part in cut_plain(beginning, stream):
            text = decoded(part, name=name, line=line, offset=offset, reading=reading)
            if text is not None or (begun and not more):  # a part that is passed over may be the last
                yield Document(name, text or "", more)
                begun = more
            line += part.count(b"\n")
            offset += len(part)
    except Exception:
        if begun:  # what was read before the damage remains a document
            yield Document(name, "")
        raise


def not_utf8(data: bytes, bad: int, *, name: str, line: int, offset: int, reading: Reading) -> None:
    """Report byte `bad` of the data, which are at `line` and `offset` of a file."""
    bad_line = line + data.count(b"\n", 0, bad)
    reading.bad(
        f"{name}:{bad_line}: byte {offset + bad} of the file (0x{data[bad]:02x}) is not UTF-8",
        fix="convert the file (iconv -f ITS_ENCODING -t UTF-8), or skip invalid text with --on_error skip",
    )


def cut_plain(beginning: bytes, stream: BinaryIO) -> Iterator[tuple[bool, bytes]]:
    """A text in parts; with each, whether more follow.

    beginning: what was already read from the stream
    """
    buffer, ended = beginning, False
    del beginning
    while not ended:
        while len(buffer) > PART_BYTES:
            cut = _word_end(buffer, 0, PART_BYTES, breaks=(b"\n", b" "))
            cut = (
                cut or buffer.rfind(b"\n", 0, PART_BYTES) + 1 or buffer.find(b"\n", PART_BYTES, LONGEST_LINE_BYTES) + 1
            )
            if not cut and len(buffer) > LONGEST_LINE_BYTES:
                cut = LONGEST_LINE_BYTES
                while cut > LONGEST_LINE_BYTES - 3 and buffer[cut] & 0xC0 == 0x80:  # inside a character
                    cut -= 1
            if cut in (0, len(buffer)):  # no line end yet, or possibly the end of the file
                break
            yield True, buffer[:cut]
            buffer = buffer[cut:]
        block = stream.read(PART_BYTES)
        buffer, ended = buffer + block, not block
    yield False, buffer


def _word_end(text: AnyStr, start: int, stop: int, *, breaks: tuple[AnyStr, ...]) -> int:
    """Where a word ends before one of the breaks and another begins after it, as late as possible; 0 if nowhere.

    Hardly any tokenizer has a token that spans such a place, so that a text cut there has the ids of the whole.
    """
    for each in breaks:
        place = stop
        for _ in range(MOST_TRIES):
            place = text.rfind(each, start + 1, place)
            if place < 0:
                break
            before, after = text[max(start, place - 4) : place], text[place + 1 : place + 5]
            if _string(before)[-1:].isalnum() and _string(after)[:1].isalnum():
                return place
    return 0


def _string(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode(errors="ignore")


def check_whole(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest; DataError if the folder has parts of documents as documents of their own: NAME#1, NAME#2, ..."""
    if "documents" in json.loads((folder / MANIFEST).read_bytes()):
        return manifest
    names = [folder / split_files(split)[2] for split in manifest.splits]
    if any(line.endswith(b"#2") for path in names for line in path.read_bytes().splitlines()):
        raise DataError(
            f"{folder} was made by an earlier version, which cut documents of more than 1 MiB in parts",
            fix=f"remove it (rm -r {folder}), or train on it as it is: --train_data_path {folder}",
        )
    return manifest
