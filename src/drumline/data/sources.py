"""A source, as the user writes it, becomes documents.

Reads single files and `builtin`, the source of Python's standard library. Folders, globs, functions
(`package.module:name`) and Hugging Face data sets are in `drumline.data.other_sources`, only imported for those.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from drumline.data.text_files import Document, Reading, read_file
from drumline.errors import DataError

__all__ = ["Document", "documents", "has_split", "source_bytes", "source_key"]

# Tests are half of the library, repeat themselves and are not shipped everywhere; encodings are tables of numbers.
_BUILTIN_WITHOUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


def documents(source: str, reading: Reading | None = None, *, split: str = "train") -> Iterator[Document]:
    """The documents of a source, in an order that does not change.

    split: which part of a source that has several (see `has_split`); any other source is all "train"
    """
    reading = reading or Reading()
    empty = True
    for document in _source(source).documents(split, reading):
        empty = False
        yield document
    if empty:
        skipped = reading.skipped
        first = f"; {skipped.count} skipped, first: {skipped.first[0]}" if skipped.count else ""
        raise DataError(f"{source} gives no documents{first}", fix="choose another source, or its --field")


def has_split(source: str, split: str) -> bool:
    """Whether the source itself is known, without a network, to have this split."""
    return split in _source(source).splits()


def source_key(source: str) -> str:
    """A short line that changes when what would be read changes: files with sizes and times, a version, a name."""
    return _source(source).key()


def source_bytes(source: str, split: str = "train") -> int | None:
    """Size on disk of what would be read (compressed files: as compressed), None where it is not known beforehand."""
    return _source(source).size_bytes(split)


class Source(Protocol):
    """What a source string stands for."""

    def splits(self) -> Collection[str]: ...
    def key(self) -> str: ...
    def size_bytes(self, split: str) -> int | None: ...
    def documents(self, split: str, reading: Reading) -> Iterator[Document]: ...


@dataclass
class Files:
    """Files read one after the other; all of them are training text."""

    source: str
    list_files: Callable[[], Sequence[Path]]
    """A large folder is only walked when someone asks."""

    def splits(self) -> Collection[str]:
        return ("train",)

    def paths(self, split: str) -> Sequence[Path]:
        check_split(split, self.splits(), source=self.source)
        return self.list_files()

    def key(self) -> str:
        return _files_key(self.source, self.list_files())

    def size_bytes(self, split: str) -> int:
        return sum(size_and_time(path)[0] for path in self.paths(split))

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        for path in self.paths(split):
            yield from read_file(path, name=path.as_posix(), reading=reading)


class _Builtin(Files):
    """The source of the running interpreter's standard library: real text that every machine has."""

    def key(self) -> str:
        version = f"{platform.python_implementation()} {platform.python_version()}"
        return f"builtin {version}: {len(self.list_files())} files, {self.size_bytes('train')} bytes"

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        # Empty files and those in another encoding are no fault of the user: skipped without a word.
        quiet = Reading(on_error="skip", on_bytes=reading.on_bytes)
        for path in self.paths(split):
            yield from read_file(path, name=path.relative_to(_builtin_folder()).as_posix(), reading=quiet)


def _builtin_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _builtin_files() -> list[Path]:
    files = walk(_builtin_folder(), without=_BUILTIN_WITHOUT)
    # The build's own settings differ from machine to machine.
    return [path for path in files if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")]


def _source(source: str) -> Source:
    """What a source string means. What exists on disk comes first, except for the word `builtin`."""
    if source == "builtin":
        return _Builtin("builtin", _builtin_files)
    path = Path(source).expanduser()
    if os.path.isfile(path):
        return Files(str(path), lambda: [path])
    from drumline.data.other_sources import other_source

    return other_source(source, path)


def cannot_be_listed(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be listed: {error.strerror}",
        fix="make it readable for this user, or give a source that leaves it out",
    ) from error


def walk(folder: Path, *, without: Collection[str]) -> list[Path]:
    """Every file below a folder, sorted by path. Hidden ones and folders named in `without` are left out.

    Links to folders are followed, but no folder is entered twice.
    """
    files: list[Path] = []
    entered: set[tuple[int, int]] = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=cannot_be_listed):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(files)


def check_split(split: str, splits: Collection[str], *, source: str) -> None:
    if split not in splits:
        raise DataError(
            f"{source} has no split {split!r}, only: {', '.join(splits)}",
            fix="choose one of these, or give that part as a source of its own",
        )


def _files_key(source: str, paths: Sequence[Path]) -> str:
    listing = hashlib.sha256()
    total_bytes = 0
    for path in paths:
        size_bytes, time_ns = size_and_time(path)
        total_bytes += size_bytes
        listing.update(f"{os.path.abspath(path)}\0{size_bytes}\0{time_ns}\n".encode(errors="surrogateescape"))
    return f"files {os.path.abspath(source)}: {len(paths)} files, {total_bytes} bytes, {listing.hexdigest()[:16]}"


def size_and_time(path: Path) -> tuple[int, int]:
    """Size in bytes and modification time in ns; zeros for a file that is not readable, which reading will report."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
