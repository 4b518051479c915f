"""Data sets of the Hugging Face hub: by name over the network, or as a folder of parquet files in the hub's layout.

The only module that knows the hub's names, its file layout and the `datasets` package.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.data.text_files import PART_BYTES, Document, Reading, missing_field, string_value
from drumline.errors import DataError, MissingExtraError

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


@dataclass(frozen=True)
class HubDataset:
    """A data set that the `datasets` package fetches, or has in its cache."""

    source: str
    """The name as the user gave it."""
    name: str
    config: str | None

    def splits(self) -> Collection[str]:
        """What is known without asking the network."""
        return ("train", "validation", "test") if self._is_wikitext() else ("train",)

    def key(self) -> str:
        return f"hub {self.name}:{self.config or 'default'}"

    def size_bytes(self, split: str) -> None:
        """Not known before it is fetched."""

    def documents(self, split: str, reading: Reading) -> Iterator[Document]:
        rows = self._rows(split, reading)
        return articles(rows) if self._is_wikitext() else rows

    def _is_wikitext(self) -> bool:
        return (self.config or self.name.split("/")[1]).startswith("wikitext")

    def _rows(self, split: str, reading: Reading) -> Iterator[Document]:
        dataset = _load(self.name, self.config, split)
        place = f"{self.source}/{split}"
        if reading.field not in dataset.column_names:
            problem, fix = missing_field(place, present=dataset.column_names, field=reading.field)
            raise DataError(problem, fix=fix)
        number = 0
        for batch in dataset.select_columns([reading.field]).iter(batch_size=_BATCH_ROWS):
            for value in batch[reading.field]:
                number += 1
                where = f"{place}:{number}"
                if text := string_value(value, where=where, reading=reading):
                    yield Document(where, text)


def hub_dataset(source: str) -> HubDataset | None:
    """The data set that a name stands for, or None where it cannot be one."""
    if source in SHORTHANDS:
        return HubDataset(source, WIKITEXT, SHORTHANDS[source])
    match = _HUB_NAME.fullmatch(source)
    return HubDataset(source, match["name"], match["config"]) if match else None


def hub_layout(folder: Path) -> dict[str, list[Path]]:
    """Split -> its parquet files in order, for a folder laid out as on the hub; empty for any other folder.

    The files lie in the folder itself or in one folder below it: data/, or one per configuration.
    """
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if here := _shards(folder):
        return here
    found = {path: shards for path in below if (shards := _shards(path))}
    if len(found) > 1:
        raise DataError(
            f"{folder} holds {len(found)} data sets: {', '.join(path.name for path in found)}",
            fix=f"name one of them: {next(iter(found))}",
        )
    return next(iter(found.values()), {})


def holds_articles(folder: Path, shards: Iterable[Path]) -> bool:
    """Whether the parquet files below `folder` are WikiText, whose rows are single lines."""
    names = {folder.resolve().name, *(shard.parent.name for shard in shards)}
    return any(name.startswith("wikitext") for name in names)


def articles(rows: Iterable[Document]) -> Iterator[Document]:
    """WikiText's rows, one line each, joined into one document per article, named after its first row.

    The joined texts are exactly the rows' texts; an article starts at its title, ` = Title = `.
    """
    name, lines, size = "", list[str](), 0
    for row in rows:
        # The size only matters for data that bears WikiText's name but has no titles: it must not become one text.
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
            splits.setdefault(match["split"], []).append(path)
    return splits


def _load(name: str, config: str | None, split: str) -> Any:
    """The `datasets.Dataset`. Without a network only the cache is asked, so that the answer comes in seconds."""
    try:
        import datasets
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingExtraError(f"the hub's data set {name}", extra="datasets") from error
    online = _hub_answers()
    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = was_offline or not online
    try:
        return datasets.load_dataset(name, config, split=split, streaming=False)
    except Exception as error:  # the package raises whatever its many parts raise
        full_name = f"{name}:{config}" if config else name
        if isinstance(error, OSError) and not online:
            raise DataError(
                f"the Hugging Face hub ({constants.ENDPOINT}) cannot be reached, and {full_name} is not in the cache",
                fix="check the network, or use a local copy: give a folder of parquet files in the hub's layout "
                f"({split}-00000-of-00001.parquet, ...) as SOURCE or --train_data_path",
            ) from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"the hub's data set {full_name}, split {split!r}, cannot be loaded: {reason}",
            fix="check the name, OWNER/NAME or OWNER/NAME:CONFIG, and log in (hf auth login) if it is not public",
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _hub_answers() -> bool:
    """Whether the hub answers within seconds. Any answer will do; proxies are those of the hub's own client."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # public, but exported lazily

    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # no route, no name, no proxy, offline mode: all the same here
            get_session().head(constants.ENDPOINT, timeout=_PROBE_S)
            answered.set()

    # In a thread because looking up a name can hang for longer than any timeout of the client.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_S + 1.0)
    return answered.is_set()
