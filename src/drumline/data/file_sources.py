"""Files as a data source: listed, identified by size and time, and read one after the other.

In a folder or glob, what is called valid, val or validation (a file, or a folder) is validation data: it is held out
and never trained on. What is called test, beside something called train or one of these, is not used at all. Longer
names count beside their twin: stories-valid.txt beside stories-train.txt.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from drumline.data.sources import Document, Reading, read_file
from drumline.errors import DataError

HELD_OUT = ("valid", "val", "validation")
SPLITS = {"train": "train", "test": "test", **dict.fromkeys(HELD_OUT, "validation")}
"""What a file or folder is called, and which split that makes it."""


@dataclass
class Files:
    """Files read one after the other; all of them are training text, unless their names say otherwise."""

    source: str
    list_files: Callable[[], Sequence[Path]]
    """A large folder is listed only on demand."""
    folder: Path | None = None
    """Names below this folder may name a split; None: all of the files are meant."""

    def splits(self) -> Collection[str]:
        return ("train", "validation") if "validation" in self._by_split else ("train",)

    def paths(self, split: str) -> Sequence[Path]:
        check_split(split, self.splits(), source=self.source)
        return self._by_split[split]

    def key(self) -> str:
        named = "" if len(self._by_split) == 1 else " by split"
        used = [path for split, paths in self._by_split.items() if split != "test" for path in paths]
        return _files_key(self.source, used, named=named)

    def note(self, *, has_valid: bool) -> str:
        """What is held out because of its name, for users; has_valid: whether other validation data was given"""
        uses = "not used: --valid_data_path is" if has_valid else "held out for validation"
        listed = {uses: self._by_split.get("validation", []), "not used": self._by_split.get("test", [])}
        return "".join(f"; {_few(paths, self.folder)} {use}" for use, paths in listed.items() if paths)

    @cached_property
    def _by_split(self) -> dict[str, Sequence[Path]]:
        paths = self.list_files()
        splits: dict[str, list[Path]] = {}
        for path, split in zip(paths, _named_splits(paths, self.folder) if self.folder else (), strict=False):
            splits.setdefault(split, []).append(path)
        return {**splits} if splits.get("train") else {"train": paths}

    def size_bytes(self, split: str) -> int:
        return sum(size_and_time(path)[0] for path in self.paths(split))

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        for path in self.paths(split):
            yield from read_file(path, name=path.as_posix(), reading=reading)


def _named_splits(paths: Sequence[Path], folder: Path) -> Iterator[str]:
    """The split of each file, by the outermost name on its path that is a split's."""
    names = [path.relative_to(folder).parts for path in paths]
    beside: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for parts in names:
        for depth, part in enumerate(parts):
            beside.setdefault(parts[:depth], set()).update((_words(part), (_stem(part),)))
    for parts in names:
        splits = (_split(part, beside[parts[:depth]], top=depth == 0) for depth, part in enumerate(parts))
        yield next((split for split in splits if split != "train"), "train")


def _stem(part: str) -> str:
    return part.lower().partition(".")[0]


def _words(part: str) -> tuple[str, ...]:
    """TinyStories-valid.txt: tinystories valid txt; numbers do not count."""
    return tuple(word for word in re.split(r"[-_.]", part.lower()) if not word.isdigit())


def _split(part: str, beside: set[tuple[str, ...]], *, top: bool) -> str:
    """The split that a file or folder is called after, among the words and the stems of all that is beside it.

    top: whether it is in the source's own folder. Elsewhere a name counts only beside a train: in source code,
    `validation` and `test` mean something else.
    """
    if (split := SPLITS.get(_stem(part))) is not None:
        held_out = any((name,) in beside for name in HELD_OUT)
        counts = ("train",) in beside or (top and (split == "validation" or held_out))
        return split if counts else "train"
    words = _words(part)
    for index, word in enumerate(words):
        if SPLITS.get(word, "train") != "train" and (*words[:index], "train", *words[index + 1 :]) in beside:
            return SPLITS[word]
    return "train"


def _few(paths: Sequence[Path], folder: Path | None) -> str:
    first = paths[0].relative_to(folder).as_posix() if folder else paths[0].as_posix()
    return f"{first} is" if len(paths) == 1 else f"{first} and {len(paths) - 1} more are"


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


def _files_key(source: str, paths: Sequence[Path], *, named: str) -> str:
    listing = hashlib.sha256()
    total_bytes = 0
    for path in paths:
        size_bytes, time_ns = size_and_time(path)
        total_bytes += size_bytes
        listing.update(f"{os.path.abspath(path)}\0{size_bytes}\0{time_ns}\n".encode(errors="surrogateescape"))
    return (
        f"files{named} {os.path.abspath(source)}: {len(paths)} files, {total_bytes} bytes, {listing.hexdigest()[:16]}"
    )


def size_and_time(path: Path) -> tuple[int, int]:
    """Size in bytes and modification time in ns; zeros for an unreadable file, which reading will report."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def refuse_url(source: str) -> NoReturn:
    """Text is not read from stores, other than datasets of the Hub by their names."""
    scheme, _, place = source.partition("://")
    bare = re.sub(r"^[^/]*@|[?#].*", "", place)  # a password or a signed query is shown nowhere
    parts = [part for part in bare.split("/") if part]
    if scheme == "hf" and parts[:1] == ["datasets"] and len(parts) >= 3:
        fix = f"use its name, which is streamed: {parts[1]}/{parts[2].partition('@')[0]}"
    else:
        copies = {
            "s3": f"aws s3 cp --recursive s3://{bare} text",
            "gs": f"gcloud storage cp -r gs://{bare} text",
            "az": f"az storage blob download-batch -s {(parts or ['CONTAINER'])[0]} -d text",
            "hf": f"hf download {'/'.join(parts[:2])} --local-dir text",
        }
        copy = copies.get(scheme, f"curl -LO --create-dirs --output-dir text {scheme}://{bare}")
        fix = f"copy it to a disk, then use the copy: {copy}"
    raise DataError(
        f"{scheme}://{bare} is a URL, and text is not read from URLs, only tokens that are prepared", fix=fix
    )
