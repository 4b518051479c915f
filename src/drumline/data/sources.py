"""A data source, as the user writes it, becomes documents, streamed: memory stays small whatever the size.

Handles `builtin`, the source code of Python's standard library, and plain text files. Folders, globs, functions
(`package.module:name`) and Hugging Face datasets are in `drumline.data.other_sources`; JSON, parquet and compressed
files in `drumline.data.structured_files`: imported only when needed.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sysconfig
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from drumline.config import OnError
from drumline.errors import DataError

PART_BYTES = 1 << 20
"""A longer plain text file is read in parts of about this size."""
STRUCTURED_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")

MAKE_AGAIN = "create or download the file again, or skip it with --on_error skip"
REMOVE_EMPTY = "remove the file, or skip empty files with --on_error skip"
_REASONS_KEPT = 5
# Tests are half of the library, repetitive and not always installed; encodings are tables of numbers.
_BUILTIN_WITHOUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


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
    unpack: Callable[..., Any] | None = None
    """Instead of `encoding.unpacked_ahead`."""

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


def documents(source: str, reading: Reading | None = None, *, split: str = "train") -> Iterator[Document]:
    """The documents of a source, in a deterministic order.

    split: which split of a source that has several (see `has_split`); any other source is all "train"
    """
    reading, empty = reading or Reading(), True
    for document in _source(source).documents(split, reading):
        empty = False
        yield document
    if empty:
        raise no_documents(source, reading.skipped)


def no_documents(source: str, skipped: Skipped) -> DataError:
    first = f"; {skipped.count} skipped, first: {skipped.first[0]}" if skipped.count else ""
    return DataError(f"{source} contains no documents{first}", fix="choose another source or --field")


def has_split(source: str, split: str) -> bool:
    """Whether the source is known, without network access, to have this split."""
    return split in _source(source).splits()


def source_key(source: str) -> str:
    """A short line that changes when the content changes: files with sizes and times, a version, a name."""
    return _source(source).key()


def source_bytes(source: str, split: str = "train") -> int | None:
    """Bytes to read from disk (compressed files: compressed size); None if unknown."""
    return _source(source).size_bytes(split)


class Source(Protocol):
    """The source that a string refers to."""

    def splits(self) -> Collection[str]: ...
    def key(self) -> str: ...
    def size_bytes(self, split: str) -> int | None: ...
    def documents(self, split: str, reading: Reading) -> Iterator[Document]: ...


class _Builtin:
    """Source code of the running interpreter's standard library: real text that every machine has."""

    def __init__(self) -> None:
        self._folder = Path(sysconfig.get_path("stdlib"))

    def splits(self) -> Collection[str]:
        return ("train",)

    def key(self) -> str:
        version = f"{platform.python_implementation()} {platform.python_version()}"
        return f"builtin {version}: {len(self._files)} files, {self.size_bytes('train')} bytes"

    def size_bytes(self, split: str) -> int:
        return sum(path.stat().st_size for path in self._files)

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        if split != "train":
            from drumline.data.file_sources import check_split

            check_split(split, self.splits(), source="builtin")
        # Empty files and those in another encoding are not the user's fault: skipped silently.
        quiet = Reading(on_error="skip", on_bytes=reading.on_bytes)
        for path in self._files:
            yield from read_file(path, name=path.relative_to(self._folder).as_posix(), reading=quiet)

    @cached_property
    def _files(self) -> list[Path]:
        files = []
        for here, folders, names in os.walk(self._folder):
            folders[:] = [name for name in folders if name not in _BUILTIN_WITHOUT and not name.startswith(".")]
            # The build configuration differs between machines.
            files += [Path(here, n) for n in names if n.endswith(".py") and not n.startswith((".", "_sysconfigdata"))]
        return sorted(files)


def _source(source: str) -> Source:
    """The source that a string refers to. Existing paths take precedence, except for the word `builtin`."""
    if source == "builtin":
        return _Builtin()
    from drumline.data.other_sources import other_source

    return other_source(source)
