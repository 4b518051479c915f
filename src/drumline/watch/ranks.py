"""ranks.jsonl: the time of a step in phases, for each rank. A bounded number of records, however long the run."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_MOST_PHASES, _MOST_RANKS = 32, 1 << 16
_MOST_CELLS = 4 << 20
_MOST_RECORDS = 480
WAIT = "wait"
SLOW = 1.15
"""A rank that is busy for so many times the median is marked."""


@dataclass(frozen=True)
class RankRecord:
    """Seconds of one step: float32 (phases, ranks)."""

    step: int
    time: float
    phases: tuple[str, ...]
    seconds: Floats

    @property
    def ranks(self) -> int:
        return int(self.seconds.shape[1])

    @property
    def busy(self) -> Floats:
        """Without waiting for others, which is what sets a slow rank apart: (ranks,)"""
        own = [index for index, name in enumerate(self.phases) if name != WAIT]
        return np.asarray(self.seconds[own].sum(axis=0), dtype=np.float32)


class RankRecords:
    """Records at even distances over the whole run, and the newest."""

    def __init__(self) -> None:
        self.records: list[RankRecord] = []
        self.count = 0

    def add(self, records: list[dict[str, Any]]) -> None:
        """Append records; what has another form is left out."""
        for record in records:
            parsed = _parse(record)
            if parsed is None:
                continue
            self.count += 1
            self.records.append(parsed)
            most = max(32, min(_MOST_RECORDS, _MOST_CELLS // max(1, parsed.seconds.size)))
            if len(self.records) > most:
                self.records = _halved(self.records)

    def clear(self) -> None:
        self.records, self.count = [], 0

    def as_json(self, *, columns: int = 160) -> dict[str, Any]:
        """What the page draws: busy seconds of every rank over time (float32, base64), and the newest phases."""
        if not self.records:
            return {"count": 0}
        records = self.records
        while len(records) > columns:
            records = _halved(records)
        newest = self.records[-1]
        ranks = max(record.ranks for record in records)
        busy = np.full((len(records), ranks), np.nan, dtype="<f4")
        for row, record in zip(busy, records, strict=True):
            row[: record.ranks] = record.busy
        return {
            "count": self.count,
            "steps": [record.step for record in records],
            "times": [record.time for record in records],
            "ranks": ranks,
            "busy": base64.b64encode(busy.tobytes()).decode(),
            "step": newest.step,
            "phases": list(newest.phases),
            "seconds": [[round(float(value), 6) for value in row] for row in newest.seconds],
            "slow": slow_ranks(newest),
        }


def slow_ranks(record: RankRecord) -> list[dict[str, Any]]:
    """Ranks that are busy for much longer than the median, slowest first."""
    busy = record.busy
    median = float(np.median(busy))
    if record.ranks < 2 or median <= 0:
        return []
    slow = [int(rank) for rank in np.argsort(-busy, kind="stable") if busy[rank] > SLOW * median]
    return [{"rank": rank, "times": round(float(busy[rank]) / median, 3)} for rank in slow]


def _halved(records: list[RankRecord]) -> list[RankRecord]:
    """Every two records become one, with the slower one of each rank: a slow step stays visible."""
    halved = []
    for first, second in zip(records[0:-1:2], records[1::2], strict=False):
        if first.phases != second.phases or first.ranks != second.ranks:
            halved += [first, second]
            continue
        slower = np.where(second.busy > first.busy, second.seconds, first.seconds)
        halved.append(RankRecord(second.step, second.time, second.phases, slower))
    halved += records[len(records) // 2 * 2 :]
    # Many changes of the world size: then the oldest go.
    return halved if len(halved) < len(records) else halved[len(halved) // 2 :]


def _parse(record: dict[str, Any]) -> RankRecord | None:
    try:
        seconds = dict(record["seconds"])
        phases = tuple(str(name)[:40] for name in seconds)
        array = np.array(list(seconds.values()), dtype=np.float32)
        if array.ndim != 2 or not 0 < len(phases) <= _MOST_PHASES or not 0 < array.shape[1] <= _MOST_RANKS:
            return None
        array = np.nan_to_num(array, nan=0.0, posinf=0.0, neginf=0.0).clip(min=0)
        time = float(record.get("time") or 0.0)
        return RankRecord(int(record["step"]), time if np.isfinite(time) else 0.0, phases, array)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
