"""A source, as the user writes it, becomes documents.

Knows what a source can be: a file, a folder, a glob, `builtin`, `package.module:name` or a data set of the Hugging Face
hub. How one file is read is in `drumline.data.text_files`, what concerns the hub in `drumline.data.hub`.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

from drumline.config import OnError
from drumline.data.hub import SHORTHANDS, articles, holds_articles, hub_dataset, hub_layout
from drumline.data.text_files import Document, Reading, Skipped, is_text_file, read_file, string_value
from drumline.errors import DataError
from drumline.plugins import is_plugin, load_plugin, plugin_file

__all__ = ["Document", "Skipped", "documents", "has_split", "source_bytes", "source_key"]

_KINDS = "a file, a folder, a glob, builtin, package.module:name or a hub data set OWNER/NAME[:CONFIG]"
_GLOB_FIX = "try the pattern with ls; ** stands for folders only between slashes, as in 'data/**/*.txt'"
# Tests are half of the library, repeat themselves and are not shipped everywhere; encodings are tables of numbers.
_BUILTIN_WITHOUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings"}


def documents(
    source: str,
    *,
    field: str = "text",
    on_error: OnError = "stop",
    split: str = "train",
    skipped: Skipped | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[Document]:
    """The documents of a source, in an order that does not change.

    field:    the field of JSON lines, parquet and hub rows that holds the text
    on_error: "stop" raises a DataError at the first damage; "skip" counts it in `skipped` and goes on behind it
    split:    which part of a source that brings several (see `has_split`); any other source is all "train"
    on_bytes: told the bytes newly consumed on disk; they add up to `source_bytes`
    """
    found = _find(source)
    reading = Reading(
        field=field, on_error=on_error, skipped=skipped or Skipped(), on_bytes=on_bytes or (lambda _: None)
    )
    return _at_least_one(found.documents(split, reading), source=source, reading=reading)


def has_split(source: str, split: str) -> bool:
    """Whether the source itself is known, without a network, to bring this split."""
    return split in _find(source).splits()


def source_key(source: str) -> str:
    """A short line that changes when what would be read changes: files with sizes and times, a version, a name."""
    return _find(source).key()


def source_bytes(source: str, split: str = "train") -> int | None:
    """Size on disk of what would be read (packed files: as packed), None where it is not known beforehand."""
    return _find(source).size_bytes(split)


class _Source(Protocol):
    def splits(self) -> Collection[str]: ...
    def key(self) -> str: ...
    def size_bytes(self, split: str) -> int | None: ...
    def documents(self, split: str, reading: Reading) -> Iterator[Document]: ...


@dataclass(frozen=True)
class _Files:
    """Files of no particular split."""

    source: str
    find: Callable[[], Sequence[Path]]
    """Lists the files; a large folder is only walked when someone asks."""

    def splits(self) -> Collection[str]:
        return ("train",)

    def key(self) -> str:
        return _files_key(self.source, self.find())

    def size_bytes(self, split: str) -> int:
        _check_split(split, self.splits(), source=self.source)
        return sum(_size_and_time(path)[0] for path in self.find())

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        _check_split(split, self.splits(), source=self.source)
        for path in self.find():
            yield from read_file(path, name=path.as_posix(), reading=reading)


@dataclass(frozen=True)
class _HubFolder:
    """A local folder of parquet files in the hub's layout."""

    source: str
    shards: dict[str, list[Path]]

    def splits(self) -> Collection[str]:
        return self.shards.keys()

    def key(self) -> str:
        return _files_key(self.source, [path for paths in self.shards.values() for path in paths])

    def size_bytes(self, split: str) -> int:
        _check_split(split, self.splits(), source=self.source)
        return sum(_size_and_time(path)[0] for path in self.shards[split])

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        _check_split(split, self.splits(), source=self.source)
        paths = self.shards[split]
        rows = (row for path in paths for row in read_file(path, name=path.as_posix(), reading=reading))
        return articles(rows) if holds_articles(Path(self.source), paths) else rows


class _Builtin:
    """The source of the running interpreter's standard library: real text that every machine has."""

    def splits(self) -> Collection[str]:
        return ("train",)

    def key(self) -> str:
        version = f"{platform.python_implementation()} {platform.python_version()}"
        return f"builtin {version}: {len(self._paths())} files, {self.size_bytes('train')} bytes"

    def size_bytes(self, split: str) -> int:
        _check_split(split, self.splits(), source="builtin")
        return sum(_size_and_time(path)[0] for path in self._paths())

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        _check_split(split, self.splits(), source="builtin")
        # Empty files and those in another encoding are no fault of the user: passed over without a word.
        quiet = Reading(on_error="skip", on_bytes=reading.on_bytes)
        for path in self._paths():
            yield from read_file(path, name=path.relative_to(self._folder()).as_posix(), reading=quiet)

    @staticmethod
    def _folder() -> Path:
        return Path(sysconfig.get_path("stdlib"))

    def _paths(self) -> list[Path]:
        return [
            path
            for path in _walk(self._folder(), without=_BUILTIN_WITHOUT)
            # The build's own settings differ from machine to machine.
            if path.suffix == ".py" and not path.name.startswith("_sysconfigdata")
        ]


@dataclass(frozen=True)
class _Function:
    """A user's function without arguments that yields strings or Documents."""

    source: str

    def splits(self) -> Collection[str]:
        return ("train",)

    def key(self) -> str:
        origin = plugin_file(self.source)
        return f"function {self.source} {_size_and_time(origin) if origin else ''}".rstrip()

    def size_bytes(self, split: str) -> None:
        """Only the function knows."""

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        _check_split(split, self.splits(), source=self.source)
        items = load_plugin(self.source)()
        name = self.source.partition(":")[2]
        if isinstance(items, str) or not isinstance(items, Iterable):
            raise DataError(
                f"{self.source}() returns {type(items).__name__}, not one text after another",
                fix=f"write {name} as a generator: yield each text",
            )
        for number, item in enumerate(items, start=1):
            where = item.name if isinstance(item, Document) else f"{self.source}:{number}"
            text = item.text if isinstance(item, Document) else item
            if not isinstance(text, str):
                reading.bad(
                    f"{where}: {name} yields {type(text).__name__}, not str or Document",
                    fix="yield strings or drumline.data.sources.Document, or pass over others with --on_error skip",
                )
            elif text := string_value(text, where=where, reading=reading):
                yield Document(where, text)


def _find(source: str) -> _Source:
    """What a source string means. What exists on disk comes first, except for the word `builtin`."""
    if source == "builtin":
        return _Builtin()
    if not source.strip():
        raise DataError("the source is an empty string", fix=f"give {_KINDS}")
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            shards = hub_layout(path)
            return _HubFolder(str(path), shards) if shards else _Files(str(path), partial(_folder_files, path))
        if path.exists():
            return _Files(str(path), lambda: [path])
    except OSError as error:
        _cannot_look(error)
    if glob.has_magic(source):
        return _Files(str(path), partial(_glob_files, path))
    if is_plugin(source):
        return _Function(source)
    dataset = hub_dataset(source)
    if dataset and (source in SHORTHANDS or not _looks_like_a_path(path)):
        return dataset
    raise DataError(f"there is no {source}", fix=_fix_for_missing(path))


def _cannot_look(error: OSError) -> NoReturn:
    raise DataError(
        f"{error.filename} cannot be looked at: {error.strerror}",
        fix="make it readable for this user, or give a source that leaves it out",
    ) from error


def _looks_like_a_path(path: Path) -> bool:
    """Whether `folder/name` is rather a mistyped file than OWNER/NAME on the hub."""
    return is_text_file(path) or bool(_close_files(path))


def _close_files(path: Path) -> list[str]:
    with suppress(OSError):
        return difflib.get_close_matches(path.name, os.listdir(path.parent))
    return []


def _fix_for_missing(path: Path) -> str:
    if len(path.parts) == 1:
        candidates = [*_close_files(path), "builtin", *SHORTHANDS]
    else:
        candidates = [(path.parent / name).as_posix() for name in _close_files(path)]
    missing_folder = "" if path.parent.is_dir() else f"the folder {path.parent} does not exist; "
    return _did_you_mean(path.as_posix(), candidates) or f"{missing_folder}give {_KINDS}"


def _did_you_mean(word: str, candidates: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, candidates, n=3)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _folder_files(folder: Path) -> list[Path]:
    files = [path for path in _walk(folder, without=frozenset()) if is_text_file(path)]
    if not files:
        raise DataError(
            f"{folder} has no file whose name ends like text (.txt, .md, .py, .jsonl, .parquet, .txt.gz, ...)",
            fix=f"name the files with a glob: '{folder}/**/*.SUFFIX'",
        )
    return files


def _glob_files(pattern: Path) -> list[Path]:
    fixed = 0
    while not glob.has_magic(pattern.parts[fixed]):
        fixed += 1
    base, magic = Path(*pattern.parts[:fixed]), Path(*pattern.parts[fixed:])
    if magic.name == "**":  # pathlib takes it for folders only
        magic /= "*"
    try:  # pathlib's ** does not follow links, so that a loop of links cannot trap it; it does find hidden files
        matches = [path for path in base.glob(str(magic)) if not path.is_dir()]
    except ValueError as error:
        raise DataError(f"{pattern} is not a glob: {error}", fix=_GLOB_FIX) from error
    files = sorted(path for path in matches if not any(part.startswith(".") for part in path.relative_to(base).parts))
    if not files:
        raise DataError(f"no file matches {pattern}", fix=_GLOB_FIX)
    return files


def _walk(folder: Path, *, without: Collection[str]) -> list[Path]:
    """Every file below a folder, sorted by path. Hidden ones and folders named in `without` are left out.

    Links to folders are followed, but no folder is entered twice.
    """
    files: list[Path] = []
    entered: set[tuple[int, int]] = set()
    for here, folders, names in os.walk(folder, followlinks=True, onerror=_cannot_look):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in without)
        files += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _check_split(split: str, splits: Collection[str], *, source: str) -> None:
    if split not in splits:
        raise DataError(
            f"{source} has no split {split!r}, only: {', '.join(splits)}",
            fix="choose one of these, or give that part as a source of its own",
        )


def _files_key(source: str, paths: Sequence[Path]) -> str:
    listing = hashlib.sha256()
    total_bytes = 0
    for path in paths:
        size_bytes, time_ns = _size_and_time(path)
        total_bytes += size_bytes
        listing.update(f"{os.path.abspath(path)}\0{size_bytes}\0{time_ns}\n".encode(errors="surrogateescape"))
    return f"files {os.path.abspath(source)}: {len(paths)} files, {total_bytes} bytes, {listing.hexdigest()[:16]}"


def _size_and_time(path: Path) -> tuple[int, int]:
    """Size in bytes and modification time in ns; zeros for a file that cannot be looked at, which reading reports."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _at_least_one(found: Iterator[Document], *, source: str, reading: Reading) -> Iterator[Document]:
    none = True
    for document in found:
        none = False
        yield document
    if none:
        passed_over = reading.skipped
        first = f"; {passed_over.count} passed over, first: {passed_over.first[0]}" if passed_over.count else ""
        raise DataError(
            f"{source} gives no documents{first}", fix="choose a source with text, or its field with --field NAME"
        )
