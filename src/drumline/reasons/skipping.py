"""Skip lists: documents that a run does not train on.

A list is a file of JSON with the documents' names and token ranges, and the sha256 of the token file that they are of.
Every window that has a token of one of them, be it the last target, is no item any more, and the visit order is over
the others: which windows step k trains on is still a function of the seed and k alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from drumline.data import BatchPlan, TokenBatches, TokenFile, visits
from drumline.errors import ConfigError, DataError
from drumline.files import file_sha256, replace_text

FORMAT = "drumline-skip-list"
FORMAT_VERSION = 1


@dataclass(frozen=True, order=True)
class Skipped:
    """A document: tokens start..stop-1 of the file."""

    start: int
    stop: int
    name: str


@dataclass(frozen=True)
class SkipList:
    tokens_sha256: str
    documents: tuple[Skipped, ...]

    @property
    def digest(self) -> str:
        """By which a resumed run knows the list it began with; names do not matter."""
        ranges = sorted((each.start, each.stop) for each in self.documents)
        return hashlib.sha256(json.dumps([self.tokens_sha256, ranges]).encode()).hexdigest()[:16]


def tokens_sha256(tokens: TokenFile) -> str:
    """Of the file; token files of other trainers do not come with theirs."""
    return tokens.sha256 or file_sha256(tokens.path)


def read_skip_list(path: Path, tokens: TokenFile) -> SkipList:
    """A list for these tokens; any other is refused."""
    found = _parsed(path)
    sha256 = tokens_sha256(tokens)
    if found.tokens_sha256 != sha256:
        raise DataError(
            f"the skip list {path} is for tokens with sha256 {found.tokens_sha256}, but {tokens.path} has {sha256}",
            fix="make a list for these tokens: drumline blame RUN --step N --exclude ..., or train without --skip_list",
        )
    beyond = [each for each in found.documents if not 0 <= each.start < each.stop <= len(tokens)]
    if beyond:
        raise DataError(
            f"the skip list {path} has a document of tokens {beyond[0].start} to {beyond[0].stop}, but {tokens.path} "
            f"has {len(tokens)}",
            fix="write the list again with drumline blame --exclude",
        )
    return found


def _parsed(path: Path) -> SkipList:
    again = "check the path after --skip_list; drumline blame RUN --step N --exclude writes such a file"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DataError(f"the skip list {path} cannot be read: {why}", fix=again) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is not a skip list", fix=again)
    if content.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {content.get('format_version')}, but this drumline reads {FORMAT_VERSION}",
            fix="pip install --upgrade drumline, or write the list again",
        )
    try:
        documents = [Skipped(_whole(d["start"]), _whole(d["stop"]), str(d["name"])) for d in content["documents"]]
        return SkipList(str(content["tokens_sha256"]), tuple(documents))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"the skip list {path} is damaged: {type(error).__name__} {error}", fix=again) from None


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no position")
    return value


def write_skip_list(
    path: Path, tokens: TokenFile, documents: Sequence[Skipped], *, also: Path | None = None
) -> SkipList:
    """Write a list, or add to the one that is there, and to `also`, the list that the run itself was trained with."""
    known: set[Skipped] = set()
    for before in {path, also or path}:
        if before.exists() or before == also:
            known |= set(read_skip_list(before, tokens).documents)
    made = SkipList(tokens_sha256(tokens), tuple(sorted(known | set(documents))))
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "tokens_sha256": made.tokens_sha256}
    listed = [asdict(each) for each in made.documents]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps({**content, "documents": listed}, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{path} is not writable: {error.strerror or error}", fix="choose another file with -o"
        ) from None
    return made


def refuse_chats(tokens: TokenFile) -> None:
    """Windows of conversations are no ranges of tokens."""
    if tokens.targets is not None:
        raise DataError(
            f"{tokens.path} has conversations, which cannot be blamed or skipped",
            fix="remove rows from the file of conversations, and train on the rest",
        )


def without_skipped(path: str) -> Callable[..., TokenBatches]:
    """What makes the batches of a run that has a skip list."""
    return partial(SkippingBatches, Path(path))


class SkippingBatches(TokenBatches):
    """TokenBatches without the windows that have a token of a document in the list."""

    def __init__(self, path: Path, tokens: TokenFile, plan: BatchPlan, **more: Any) -> None:
        refuse_chats(tokens)
        if tokens.packer:
            raise ConfigError(
                f"the skip list {path} is for --packing stream: with best_fit, other documents would move",
                fix="remove the documents from the text and prepare it again, or drop --packing or --skip_list",
            )
        super().__init__(tokens, plan, **more)
        listed = read_skip_list(path, tokens)
        all_windows = self.items
        is_kept = np.ones(all_windows, dtype=bool)
        for each in listed.documents:
            # Window w has the tokens w * context to (w + 1) * context, both included: the last one is a target only.
            first = max(0, -(-(each.start - self.tokens_per_item) // self.tokens_per_item))
            is_kept[first : (each.stop - 1) // self.tokens_per_item + 1] = False
        self._kept = np.flatnonzero(is_kept)
        self.items = len(self._kept)
        # The list counts, not how many windows it leaves: --allow_change skip_list then allows all of the change.
        self.facts = {"items_per_epoch": all_windows, "skip_list": listed.digest}
        if self.items < 1:
            raise DataError(
                f"the skip list {path} leaves none of the {all_windows} sequences of {tokens.path}",
                fix="take documents out of the list, or train on more text",
            )

    def windows(self, step: int, index: int | None = None) -> list[int]:
        kept: list[int] = self._kept[visits(self, self._seed, step, index)].tolist()
        return kept
