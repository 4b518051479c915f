"""How much of a run's time training stood still for saves and snapshots, by its events.jsonl."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

_READ_BYTES = 4 << 20
"""Of a longer file only the end is read: a run with many snapshots is listed as quickly as others."""
_LEAST_S = 10.0
"""Of less time than this, no share is known: events of earlier versions have the time in seconds."""


def stalled_share(events: Path) -> float | None:
    """Between 0 and 1; None if that cannot be known (yet). The time between two processes of a run does not count."""
    stalled_s, trained_s, before = 0.0, 0.0, None
    for line in _last_lines(events):
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):  # damaged, or another's event
            event = json.loads(line)
            when = datetime.fromisoformat(event["time"])
            if event["event"] == "resumed":
                before = when
            elif event["event"] in ("saved", "snapshot"):
                if before is not None:
                    stalled_s += float(event["stall_s"])
                    trained_s += max(timedelta(), when - before).total_seconds()
                before = when
    return min(1.0, stalled_s / trained_s) if trained_s >= _LEAST_S else None


def _last_lines(path: Path) -> list[bytes]:
    with suppress(OSError):
        if path.is_file():  # nothing that would never end
            with path.open("rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - _READ_BYTES)
                file.seek(start)
                return file.read(_READ_BYTES).splitlines()[1 if start else 0 :]
    return []
