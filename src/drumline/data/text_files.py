"""One plain text file becomes documents, streamed: memory stays small whatever the size.

Detects errors inside a file. JSON, parquet and compressed files are handled by `drumline.data.structured_files`,
imported only when needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from drumline.config import OnError
from drumline.errors import DataError

PART_BYTES = 1 << 20
"""A longer plain text file is read in parts of about this size."""
STRUCTURED_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")

MAKE_AGAIN = "create or download the file again, or skip it with --on_error skip"
REMOVE_EMPTY = "remove the file, or skip empty files with --on_error skip"
_REASONS_KEPT = 5


@dataclass(frozen=True)
class Document:
    """A document, and a readable description of where it came from."""

    name: str
    """Such as corpus/a.txt, x.jsonl:17 (the line) or part.parquet:row 5."""
    text: str
    more: bool = False
    """Whether the next one continues it: a long document is read and encoded in parts."""


@dataclass
class Skipped:
    """What was skipped because it could not be read."""

    count: int = 0
    first: list[str] = dataclasses.field(default_factory=list)
    """The first few reasons, each with file and position."""
    note: str = ""
    """What else users should know; begins with a semicolon."""

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.first) < _REASONS_KEPT:
            self.first.append(reason)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read: which field, how to handle errors, and whom to report progress to."""

    field: str = "text"
    """The field of JSON, parquet and Hugging Face rows that contains the text."""
    on_error: OnError = "stop"
    """"stop" raises a DataError at the first error; "skip" counts it in `skipped` and continues after it."""
    skipped: Skipped = dataclasses.field(default_factory=Skipped)
    format: str = "text"
    """"chat": the field has a list of messages, which becomes JSON."""
    on_bytes: Callable[[int], None] = lambda _: None
    """Called with the number of bytes newly read from disk; over a source they add up to `source_bytes`."""

    def bad(self, problem: str, *, fix: str) -> None:
        """Report an error: raise, or count it and return so that the reader continues after it."""
        if self.on_error == "skip":
            self.skipped.add(problem)
        else:
            raise DataError(problem, fix=fix)


def read_file(path: Path, *, name: str, reading: Reading) -> Iterator[Document]:
    """The documents of one file, in order. `name` is shown to users; `on_bytes` adds up to the file's size."""
    size_bytes = reported_bytes = 0
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb", buffering=1 << 17) as file:
            reader = read_plain
            if path.suffix.lower() in STRUCTURED_SUFFIXES + COMPRESSED_SUFFIXES:
                from drumline.data.structured_files import read_structured as reader
            for document in reader(file, name=name, reading=reading):
                # The position in the file itself: for a compressed file, in compressed bytes.
                position_bytes = min(max(file.tell(), reported_bytes), size_bytes) if size_bytes else 0  # 0: a pipe
                reading.on_bytes(position_bytes - reported_bytes)
                reported_bytes = position_bytes
                yield document
    except OSError as error:
        reading.bad(f"{name} cannot be read: {error.strerror or error}", fix=MAKE_AGAIN)
    reading.on_bytes(size_bytes - reported_bytes)  # the unread rest: other columns, or everything after an error


def read_plain(stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[Document]:
    """The whole text as one document, in parts of about PART_BYTES."""
    beginning, more = stream.read(PART_BYTES), stream.read(1)
    if more:
        from drumline.data.cutting import read_parts

        beginning += more
        yield from read_parts(beginning, stream, name=name, reading=reading)
        return
    text = decoded(beginning, name=name, line=1, offset=0, reading=reading)
    if text is not None and text.strip():
        yield Document(name, text)
    elif text is not None:
        reading.bad(f"{name} is empty" + (" except for whitespace" if text else ""), fix=REMOVE_EMPTY)


def decoded(data: bytes, *, name: str, line: int, offset: int, reading: Reading) -> str | None:
    """Decode `data`. `line` and `offset` are its position in the file."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        from drumline.data.cutting import not_utf8

        not_utf8(data, error.start, name=name, line=line, offset=offset, reading=reading)
        return None
