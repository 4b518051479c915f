"""What is encoded already of a corpus, in a folder beside the result: OUT.parts-KEY, shared by all who work on it.

    plan.json            the stretches of the corpus, and where its held-out end begins; with it, tokenizer.json
    fast/00012.lock      held by the process that encodes a stretch; the kernel releases it, however that process ends
    fast/00012-000/      a part of a stretch: token files and part.json
    fast/00012.json      written when all parts of a stretch are there
    slow.json            why gigatoken is not used: then the folder slow/ counts, and fast/ does not
    HOST-PID.lock        held by each process that is at work

KEY is a digest of everything that determines the tokens, among it sizes and times of files: parts of other text are
never used.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline.data import Skipped, SplitRecord
from drumline.encoding.stretches import Stretch
from drumline.files import Lock, flush, replace_text

PART = "part.json"
_ME = f"{re.sub(r'[^A-Za-z0-9_]', '_', socket.gethostname())}-"


@dataclass(frozen=True)
class Part:
    """Some consecutive documents, encoded."""

    path: Path
    items: int
    """Documents, or parts of long ones."""
    splits: dict[str, SplitRecord]

    @property
    def text_bytes(self) -> int:
        return sum(split.text_bytes for split in self.splits.values())


class Journal:
    """The folder of parts; FileNotFoundError once another process has joined them and removed it."""

    def __init__(self, out: Path, key: str) -> None:
        self.folder = out.with_name(f"{out.name}.parts-{key[:12]}")
        self._others = [path for path in out.parent.glob(f"{glob.escape(out.name)}.parts-*") if path != self.folder]
        self._plan: dict[str, Any] = {}

    @contextmanager
    def open(self) -> Iterator[bool]:
        """Be at work here; gives whether parts of other text, or by other settings, were removed."""
        lock = None
        while lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has just removed it
                lock = Lock(self.folder / f"{_ME}{os.getpid()}.lock")
        lock.take()
        try:
            yield sum(map(_remove_abandoned, self._others)) > 0
        finally:
            lock.close()

    def planned(self, make: Callable[[], tuple[list[Stretch], int | None]]) -> tuple[list[Stretch], int | None]:
        """The stretches, and where the held-out end begins, as made by the first process; the others wait for it."""
        path = self.folder / "plan.json"
        lock = Lock(self.folder / "plan.lock")
        try:
            while not path.exists() and not lock.take(wait_s=1.0):
                pass
            if not path.exists():
                stretches, cut_bytes = make()
                plan = {"stretches": [asdict(each) for each in stretches], "cut_bytes": cut_bytes}
                replace_text(path, json.dumps(plan))
        finally:
            lock.close()
        plan = json.loads(path.read_bytes())
        stretches = [Stretch(**{name: _tuple(value) for name, value in each.items()}) for each in plan["stretches"]]
        return stretches, plan["cut_bytes"]

    @property
    def is_slow(self) -> bool:
        return (self.folder / "slow.json").exists()

    def slow_down(self, reason: str) -> None:
        """Encode everything by tokenizers. reason: empty if that was asked for"""
        if not self.is_slow:
            replace_text(self.folder / "slow.json", json.dumps(reason))

    def why_slow(self) -> str:
        return str(json.loads((self.folder / "slow.json").read_bytes())) if self.is_slow else ""

    @property
    def _encoded(self) -> Path:
        folder = self.folder / ("slow" if self.is_slow else "fast")
        if not folder.exists():
            folder.mkdir(exist_ok=True)
        return folder

    def done(self) -> set[int]:
        """The stretches that are encoded."""
        names = [path.partition(".") for path in os.listdir(self._encoded)]
        return {int(number) for number, _, kind in names if kind == "json"}

    @contextmanager
    def claimed(self, number: int) -> Iterator[bool]:
        """Whether this process may encode a stretch, until the end of the block."""
        path = self._encoded / f"{number:05}.lock"
        lock = Lock(path)
        try:
            mine = lock.take() and not path.with_suffix(".json").exists()
            for left in path.parent.glob(f".{number:05}-*") if mine else ():
                shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
            yield mine
        finally:
            lock.close()

    def parts(self, number: int) -> list[Part]:
        """The finished parts of a stretch, in order."""
        parts: list[Part] = []
        while (path := self._part_path(number, len(parts))).exists():
            record = json.loads((path / PART).read_bytes())
            splits = {label: SplitRecord(**split) for label, split in record["splits"].items()}
            parts.append(Part(path, record["items"], splits))
        return parts

    def add_part(self, number: int, write: Callable[[Path], tuple[int, dict[str, SplitRecord]]]) -> None:
        """Let `write` write the next part of a stretch to a folder; it returns the number of items, and the splits."""
        path = self._part_path(number, len(self.parts(number)))
        aside = path.with_name(f".{path.name}.{_ME}{os.getpid()}")
        aside.mkdir()
        try:
            items, splits = write(aside)
            record = {"items": items, "splits": {label: asdict(split) for label, split in splits.items()}}
            (aside / PART).write_text(json.dumps(record))
            for each in (*aside.iterdir(), aside):
                flush(each)
            aside.rename(path)
            flush(path.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _part_path(self, number: int, index: int) -> Path:
        return self._encoded / f"{number:05}-{index:03}"

    def finish(self, number: int, skipped: Skipped) -> None:
        replace_text(self._encoded / f"{number:05}.json", json.dumps(asdict(skipped)))

    def skipped(self, number: int) -> Skipped:
        return Skipped(**json.loads((self._encoded / f"{number:05}.json").read_bytes()))

    def remove(self) -> None:
        _remove(self.folder)


def _remove_abandoned(folder: Path) -> bool:
    """Remove parts at which no process is at work."""
    for path in folder.glob("*-*.lock"):
        lock = Lock(path)
        try:
            if not lock.take():
                return False
        finally:
            lock.close()
    return _remove(folder)


def _remove(folder: Path) -> bool:
    """All at once, so that who is about to use it does not see a half of it."""
    gone = folder.with_name(f".{folder.name}.{_ME}{os.getpid()}")
    try:
        folder.rename(gone)
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
