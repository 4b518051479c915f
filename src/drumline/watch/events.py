"""events.jsonl: what happened in a run besides steps. Frequent events are counted, and only the newest kept."""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from typing import Any

FREQUENT = ("snapshot", "saved", "skipped")
"""Of these a long run has very many."""
_KEPT, _KEPT_FREQUENT = 4000, 1000
_LONGEST = 64 << 10
"""Characters of an event that are shown."""


@dataclass
class Total:
    """Of all events of one kind."""

    count: int = 0
    bytes: int = 0
    stall_s: float = 0.0


class EventLog:
    """The events of a run, in order, with their time in seconds since 1970."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.totals: dict[str, Total] = {}
        self._rare: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._frequent: deque[dict[str, Any]] = deque(maxlen=_KEPT_FREQUENT)

    def add(self, records: list[dict[str, Any]]) -> None:
        """Append events; what has no name is none."""
        for record in records:
            name = record.get("event")
            if not isinstance(name, str):
                continue
            event = _shortened(record) | {"at": seconds_of(record.get("time")), "number": self.count}
            self.count += 1
            if len(self.totals) < 1000 or name in self.totals:
                total = self.totals.setdefault(name, Total())
                total.count += 1
                total.bytes += int(number_of(event.get("bytes")))
                total.stall_s += number_of(event.get("stall_s"))
            (self._frequent if name in FREQUENT else self._rare).append(event)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Those that are kept, in order; all, or of some names."""
        kept = sorted([*self._rare, *self._frequent], key=lambda event: int(event["number"]))
        return [event for event in kept if not names or event["event"] in names]


def seconds_of(time: Any) -> float | None:
    """An ISO time, with or without milliseconds, or a number, as seconds since 1970."""
    try:
        if isinstance(time, str):
            return datetime.fromisoformat(time).timestamp()
        if isinstance(time, int | float) and math.isfinite(time):
            return float(time)
    except (ValueError, OverflowError):
        pass
    return None


def number_of(value: Any) -> float:
    """A finite number; 0 for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    """An event of a size that a page can show; stacks of many ranks are cut in the middle of nothing but text."""
    if len(json.dumps(record)) <= _LONGEST:
        return dict(record)
    return {name: _cut(value, _LONGEST // max(1, len(record))) for name, value in list(record.items())[:64]}


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]} ..."
    if isinstance(value, dict):
        return {str(key)[:100]: _cut(each, most // max(1, len(value))) for key, each in list(value.items())[:64]}
    if isinstance(value, list):
        return [_cut(each, most // max(1, len(value))) for each in value[:1024]]
    return value
