"""The journal of a run: its events besides steps (events.jsonl), and its state (status.json)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from drumline.files.disk import LineFile
from drumline.files.events import publish
from drumline.files.run_folder import RunFolder

Attempt = Callable[[str, Callable[[], object]], None]
"""attempt(what, write): call `write`, and report an OSError as a problem with `what` instead of raising it."""


class Journal:
    """Written by rank 0; on other ranks `event` and `status` do nothing."""

    def __init__(self, folder: RunFolder, *, attempt: Attempt, writes: bool = True) -> None:
        self._folder, self._attempt, self._writes = folder, attempt, writes
        self._events = LineFile(folder.events)
        self.began = False
        """Whether `status` was called here: before that, the status is from an earlier process."""

    def event(self, name: str, /, **facts: Any) -> None:
        """Append a line to events.jsonl; if the disk fails, it is written with a later one."""
        if self._writes:
            publish({"event": name, **facts})
            line = json.dumps({"event": name, **facts, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
            self._attempt(str(self._events.path), lambda: self._events.append(line))

    def status(self, state: str, *, step: int, total_steps: int, **more: Any) -> None:
        """Replace status.json."""
        if self._writes:
            self._attempt(
                str(self._folder.status),
                lambda: self._folder.write_status(state, step=step, total_steps=total_steps, **more),
            )
            self.began = True
