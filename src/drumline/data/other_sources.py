"""Data sources of the user: files, folders, globs, functions (`package.module:name`) and Hugging Face datasets.

The only module that knows the Hub's names, its file layout and the `datasets` package.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from drumline.config import DataConfig
from drumline.data.file_sources import SPLITS, Files, cannot_be_listed, check_split, refuse_url, size_and_time, walk
from drumline.data.sources import PART_BYTES, STRUCTURED_SUFFIXES, Document, Reading, Skipped, Source
from drumline.data.structured_files import file_kind, missing_field, string_value
from drumline.data.tokens import is_tokens
from drumline.errors import DataError, MissingExtraError
from drumline.plugins import is_plugin, load_plugin, plugin_file

TEXT_SUFFIXES = frozenset(
    """
    .txt .text .md .markdown .rst .adoc .org .tex .bib .html .htm .xml .css .scss .csv .tsv .srt
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .cl .rs .go .zig .nim .d .s .asm .f .f90 .f95
    .java .kt .kts .scala .groovy .clj .cs .fs .vb .swift .m .mm .dart .js .mjs .jsx .ts .tsx .vue .php .rb
    .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .elm .lisp .el .scm .rkt .lean .agda .pas .ada .tcl
    .sh .bash .zsh .fish .ps1 .bat .sql .graphql .proto .cmake .mk .yaml .yml .toml .ini .cfg .conf .vim .awk
    """.split()  # a hundred quoted lines read worse
)
"""Suffixes that are read as plain text in a folder; a single file may have any suffix."""

WIKITEXT = "Salesforce/wikitext"
SHORTHANDS = {
    "wikitext-2": "wikitext-2-raw-v1",
    "wikitext-2-raw-v1": "wikitext-2-raw-v1",
    "wikitext-103": "wikitext-103-raw-v1",
    "wikitext-103-v1": "wikitext-103-v1",
    "wikitext-103-raw-v1": "wikitext-103-raw-v1",
}
"""Short names of WikiText's configurations."""

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?")
_SHARD = re.compile(r"(?P<split>[\w.]+)-\d{5}-of-\d{5}(-\w+)?\.parquet")
_TITLE = re.compile(r" = [^=].* = \n?")
_BATCH_ROWS = 256
_PROBE_S = 3.0
_KINDS = "a file, a folder, a glob, builtin, package.module:name or a Hugging Face dataset OWNER/NAME[:CONFIG]"
_GLOB_FIX = "try the pattern with ls; ** matches folders only between slashes, as in 'data/**/*.txt'"


def other_source(source: str) -> Source:
    """The source that a string refers to. Existing paths take precedence."""
    path = Path(source).expanduser()
    if os.path.isfile(path):
        return Files(str(path), lambda: [path])
    if not source.strip():
        raise DataError("the data source is an empty string", fix=f"use {_KINDS}")
    if "://" in source:
        refuse_url(source)
    try:
        if path.is_dir():
            shards = _hub_layout(path)
            return _HubFolder(str(path), shards) if shards else Files(str(path), partial(_folder_files, path), path)
        if path.exists():  # a pipe or a device
            return Files(str(path), lambda: [path])
    except OSError as error:
        cannot_be_listed(error)
    if glob.has_magic(source):
        return Files(str(path), partial(_glob_files, path), _before_magic(path))
    if is_plugin(source):
        return _Function(source)
    dataset = _hub_dataset(source)
    if dataset and (source in SHORTHANDS or not _looks_like_a_path(path)):
        return dataset
    raise DataError(f"{source} does not exist", fix=_fix_for_missing(path))


def source_files(source: str, split: str) -> Sequence[Path] | None:
    """The files whose documents, one after the other, are those of a source; None if it is not like that."""
    files = None if source == "builtin" else other_source(source)
    if not isinstance(files, Files) or (isinstance(files, _HubFolder) and files.holds_articles(split)):
        return None
    return files.paths(split)


def check_sources(data: DataConfig) -> None:
    """Refuse text that does not exist; nothing is read."""
    for source in (data.train_data_path, data.valid_data_path):
        if source not in (None, "builtin") and not is_tokens(source):
            other_source(source).key()


def data_note(data: DataConfig, skipped: Skipped | None = None) -> str:
    """What users should know about the data of a run: vocabulary, what names of files hold out, what was skipped."""
    if is_tokens(data.train_data_path):
        from drumline.data.of_run import largest_id, vocabulary_for

        largest = None if data.tokenizer else largest_id(data)
        chosen = largest is not None and data.vocab_size == vocabulary_for(largest)
        return f": ids up to {largest:,}; --vocab_size sets it" if chosen else ""
    note = f"; skipped {skipped.count} unreadable, first: {skipped.first[0]}" if skipped and skipped.count else ""
    with suppress(DataError, OSError):  # tokenized earlier, and not there any more
        source = other_source(data.train_data_path)
        return (source.note(has_valid=data.valid_data_path is not None) if isinstance(source, Files) else "") + note
    return note


def newest_file(source: str) -> tuple[Path, float]:
    """The file of a source that was modified last, and when, in seconds since 1970."""
    files = other_source(source)
    assert isinstance(files, Files)
    path = max(files.list_files(), key=lambda path: size_and_time(path)[1])
    return path, size_and_time(path)[1] / 1e9


def _is_text_file(path: Path) -> bool:
    """Whether a file in a folder counts as text, by its name."""
    kind, _ = file_kind(path)
    return kind in TEXT_SUFFIXES or kind in STRUCTURED_SUFFIXES


def _looks_like_a_path(path: Path) -> bool:
    """Whether `folder/name` is more likely a mistyped path than OWNER/NAME on the Hub."""
    return _is_text_file(path) or bool(_close_files(path))


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
    return _did_you_mean(path.as_posix(), candidates) or f"{missing_folder}use {_KINDS}"


def _did_you_mean(word: str, candidates: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, candidates, n=3)
    return f"did you mean {' or '.join(close)}?" if close else ""


def _folder_files(folder: Path) -> list[Path]:
    files = [path for path in walk(folder, without=frozenset()) if _is_text_file(path)]
    if not files:
        raise DataError(
            f"{folder} has no files with a known text suffix (.txt, .md, .py, .jsonl, .parquet, .txt.gz, ...)",
            fix=f"use a glob: '{folder}/**/*.SUFFIX'",
        )
    return files


def _before_magic(pattern: Path) -> Path:
    """The folder that a glob begins with."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))


def _glob_files(pattern: Path) -> list[Path]:
    base = _before_magic(pattern)
    magic = Path(*pattern.parts[len(base.parts) :])
    if magic.name == "**":  # in pathlib it matches folders only
        magic /= "*"
    try:  # pathlib's ** does not follow links, so there are no endless loops; it does find hidden files
        matches = [path for path in base.glob(str(magic)) if not path.is_dir()]
    except ValueError as error:
        raise DataError(f"{pattern} is not a glob: {error}", fix=_GLOB_FIX) from error
    files = sorted(path for path in matches if not any(part.startswith(".") for part in path.relative_to(base).parts))
    if not files:
        raise DataError(f"no files match {pattern}", fix=_GLOB_FIX)
    return files


@dataclass(frozen=True)
class _Function:
    """A user's function without arguments that yields strings or Documents."""

    source: str

    def splits(self) -> Collection[str]:
        return ("train",)

    def key(self) -> str:
        origin = plugin_file(self.source)
        return f"function {self.source} {size_and_time(origin) if origin else ''}".rstrip()

    def size_bytes(self, split: str) -> None:
        """Unknown: only the function could say."""

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        check_split(split, self.splits(), source=self.source)
        items = load_plugin(self.source)()
        name = self.source.partition(":")[2]
        if isinstance(items, str) or not isinstance(items, Iterable):
            raise DataError(
                f"{self.source}() returns {type(items).__name__}, not an iterable of texts",
                fix=f"write {name} as a generator: yield each text",
            )
        for number, item in enumerate(items, start=1):
            where = item.name if isinstance(item, Document) else f"{self.source}:{number}"
            text = item.text if isinstance(item, Document) else item
            if not isinstance(text, str) and reading.format == "text":
                reading.bad(
                    f"{where}: {name} yields {type(text).__name__}, not str or Document",
                    fix="yield strings or drumline.data.sources.Document, or skip others with --on_error skip",
                )
            elif text := string_value(text, where=where, reading=reading):
                yield Document(where, text)


class _HubFolder(Files):
    """A local folder of parquet files in the Hub's layout."""

    def __init__(self, source: str, shards: dict[str, list[Path]]) -> None:
        super().__init__(source, lambda: [path for paths in shards.values() for path in paths])
        self._shards = shards

    def splits(self) -> Collection[str]:
        return self._shards.keys()

    def paths(self, split: str) -> Sequence[Path]:
        check_split(split, self.splits(), source=self.source)
        return self._shards[split]

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        rows = super().documents(split, reading)
        return articles(rows) if self.holds_articles(split) else rows

    def holds_articles(self, split: str) -> bool:
        """Whether these are WikiText, whose rows are single lines."""
        names = {Path(self.source).resolve().name, *(path.parent.name for path in self.paths(split))}
        return any(name.startswith("wikitext") for name in names)


@dataclass(frozen=True)
class _HubDataset:
    """A dataset that the `datasets` package streams from the Hub, or has in its cache."""

    source: str
    """The name as the user wrote it."""
    name: str
    config: str | None

    def splits(self) -> Collection[str]:
        """What is known without network access."""
        return ("train", "validation", "test") if self._is_wikitext() else ("train",)

    def key(self) -> str:
        return f"hub {self.name}:{self.config or 'default'}"

    def size_bytes(self, split: str) -> None:
        """Unknown: it is not downloaded as a whole."""

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        rows = self._rows(split, reading)
        return articles(rows) if self._is_wikitext() else rows

    def _is_wikitext(self) -> bool:
        return (self.config or self.name.split("/")[1]).startswith("wikitext")

    def _rows(self, split: str, reading: Reading) -> Iterator[Document]:
        place = f"{self.source}/{split}"
        values = _values(_load(self.name, self.config, split), reading.field, place=place)
        for number, value in enumerate(values, start=1):
            where = f"{place}:{number}"
            if text := string_value(value, where=where, reading=reading):
                yield Document(where, text)


def _values(dataset: Any, field: str, *, place: str) -> Iterator[Any]:
    """The values of a field, row by row. place: what is read, for error messages"""
    number = 0
    try:
        # What is streamed does not always say its columns before the first row.
        present = dataset.column_names or list(next(iter(dataset), {}))
        if field in present:
            for batch in dataset.select_columns([field]).iter(batch_size=_BATCH_ROWS):
                for value in batch[field]:
                    number += 1
                    yield value
            return
    except Exception as error:  # of the network, after the package has tried several times, or of a damaged file
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{place} cannot be read after row {number:,}: {reason}",
            fix="run the same command again, or download the dataset and use the folder of its parquet files",
        ) from error
    problem, fix = missing_field(place, present=present, field=field)
    raise DataError(problem, fix=fix)


def _hub_dataset(source: str) -> _HubDataset | None:
    """The dataset that a name refers to, or None if it cannot be one."""
    if source in SHORTHANDS:
        return _HubDataset(source, WIKITEXT, SHORTHANDS[source])
    match = _HUB_NAME.fullmatch(source)
    return _HubDataset(source, match["name"], match["config"]) if match else None


def _hub_layout(folder: Path) -> dict[str, list[Path]]:
    """Split -> its parquet files in order, for a folder with the Hub's layout; empty for any other folder.

    The files are in the folder itself or one level below: data/, or one folder per configuration.
    """
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if here := _shards(folder):
        return here
    datasets = {path: shards for path in below if (shards := _shards(path))}
    if len(datasets) > 1:
        raise DataError(
            f"{folder} contains {len(datasets)} datasets: {', '.join(path.name for path in datasets)}",
            fix=f"choose one of them: {next(iter(datasets))}",
        )
    return next(iter(datasets.values()), {})


def articles(rows: Iterable[Document]) -> Iterator[Document]:
    """WikiText's rows, which are single lines, joined into one document per article, named after its first row.

    The joined text is exactly that of the rows; an article starts at its title, ` = Title = `.
    """
    name, lines, size = "", list[str](), 0
    for row in rows:
        # The size limit only matters for data named like WikiText but without titles: it must not become one document.
        if lines and (size > PART_BYTES or _TITLE.fullmatch(row.text)):
            yield Document(name, "".join(lines))
            lines, size = [], 0
        if not lines:
            name = row.name
        lines.append(row.text)
        size += len(row.text)
    if lines:
        yield Document(name, "".join(lines))


def _shards(folder: Path) -> dict[str, list[Path]]:
    splits: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _SHARD.fullmatch(path.name):
            splits.setdefault(SPLITS.get(match["split"], match["split"]), []).append(path)
    return splits


def _load(name: str, config: str | None, split: str) -> Any:
    """What `datasets` streams, not downloaded as a whole; without network access, its cache: errors come in seconds."""
    try:
        import datasets
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingExtraError(f"the Hugging Face dataset {name}", extra="datasets") from error
    online = _hub_answers()
    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = was_offline or not online
    try:
        return datasets.load_dataset(name, config, split=split, streaming=not datasets.config.HF_HUB_OFFLINE)
    except Exception as error:  # the package raises many kinds of exceptions
        full_name = f"{name}:{config}" if config else name
        if isinstance(error, OSError) and not online:
            raise DataError(
                f"the Hugging Face Hub ({constants.ENDPOINT}) cannot be reached, and {full_name} is not in the cache",
                fix="check the network, or use a local copy: a folder of parquet files in the Hub's layout "
                f"({split}-00000-of-00001.parquet, ...) as SOURCE or --train_data_path",
            ) from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"the Hugging Face dataset {full_name}, split {split!r}, cannot be loaded: {reason}",
            fix="check the name, OWNER/NAME or OWNER/NAME:CONFIG, and log in (hf auth login) if it is not public",
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _hub_answers() -> bool:
    """Whether the Hub responds within seconds. Any response counts; uses the proxies of the Hub's own client."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # public, but exported lazily

    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # no route, no DNS, no proxy, offline mode: all the same here
            get_session().head(constants.ENDPOINT, timeout=_PROBE_S)
            answered.set()

    # In a thread, because DNS lookups can hang longer than any timeout of the client.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_S + 1.0)
    return answered.is_set()
