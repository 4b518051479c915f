"""A data source, as the user writes it, becomes documents.

Handles `builtin`, the source code of Python's standard library. Files, folders, globs, functions
(`package.module:name`) and Hugging Face datasets are in `drumline.data.other_sources`, imported only when needed.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from drumline.data.text_files import Document, Reading, read_file
from drumline.errors import DataError

__all__ = ["Document", "documents", "has_split", "source_bytes", "source_key"]

# Tests are half of the library, repetitive and not always installed; encodings are tables of numbers.
_BUILTIN_WITHOUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


def documents(source: str, reading: Reading | None = None, *, split: str = "train") -> Iterator[Document]:
    """The documents of a source, in a deterministic order.

    split: which split of a source that has several (see `has_split`); any other source is all "train"
    """
    reading = reading or Reading()
    empty = True
    for document in _source(source).documents(split, reading):
        empty = False
        yield document
    if empty:
        skipped = reading.skipped
        first = f"; {skipped.count} skipped, first: {skipped.first[0]}" if skipped.count else ""
        raise DataError(f"{source} contains no documents{first}", fix="choose another source or --field")


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
