"""The journal of a run: its events besides steps (events.jsonl), and its state (status.json)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from drumline.files.disk import LineFile
from drumline.files.run_folder import RunFolder

EVENTS = "DRUMLINE_EVENTS"
"""Environment variable: a file or FIFO for events, as lines of JSON, from all processes of a command."""
Attempt = Callable[[str, Callable[[], object]], None]
"""attempt(what, write): call `write`, now or later but in order, and report an OSError as a problem with `what`."""


class Journal:
    """Written by rank 0; on other ranks `event` and `status` do nothing."""

    def __init__(self, folder: RunFolder, *, attempt: Attempt, writes: bool = True) -> None:
        self._folder, self._attempt, self._writes = folder, attempt, writes
        self._events = LineFile(folder.events)
        self.step: int | None = None
        """Of the last `status`; None before the first: the status is from an earlier process."""

    def event(self, event: str, **facts: Any) -> None:
        """Append a line to events.jsonl."""
        if self._writes:
            if EVENTS in os.environ:
                from drumline.files.events import publish

                publish({"event": event, **facts})
            line = json.dumps({"event": event, **facts, "time": now()})
            self._attempt(str(self._events.path), lambda: self._events.append(line))

    def status(self, state: str, *, step: int, total_steps: int, **more: Any) -> None:
        """Replace status.json."""
        if self._writes:
            write = partial(self._folder.write_status, state, step=step, total_steps=total_steps, **more)
            self._attempt(str(self._folder.status), write)
            self.step = step
            if state in ("finished", "stopped"):
                self.event(state, step=step)


def now() -> str:
    """The time of an event: 2026-11-18T07:28:29.123+00:00."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")
