"""Files as a data source: listed, identified by size and time, and read one after the other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from drumline.data.text_files import Document, Reading, read_file
from drumline.errors import DataError


@dataclass
class Files:
    """Files read one after the other; all of them are training text."""

    source: str
    list_files: Callable[[], Sequence[Path]]
    """A large folder is listed only on demand."""

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


def cannot_be_listed(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be listed: {error.strerror}",
        fix="make it readable for this user, or choose a source without it",
    ) from error


def walk(folder: Path, *, without: Collection[str]) -> list[Path]:
    """Every file below a folder, sorted by path, except hidden ones and folders in `without`.

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
            fix="choose one of these, or pass the data as a separate source",
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
    """Size in bytes and modification time in ns; zeros for an unreadable file, which reading will report."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
