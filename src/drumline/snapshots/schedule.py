"""When a snapshot is due: at fixed intervals, or as often as costs little of the training time."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHARE = 0.01
"""Of the training time, for all that snapshots cost, if the interval is not given."""
_SPARE = 1.25
"""Snapshots that are not due at fixed intervals leave some time between one and the next."""


_LATE = 3
"""So many snapshots have to be late before that is reported."""


class Schedule:
    """Of rank 0, which decides for all.

    every: steps between snapshots; None: by what they cost
    """

    def __init__(self, every: int | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._every, self._now = every, now
        self._last: tuple[float, int] | None = None
        self._cost_s = self._took_s = self._step_s = 0.0
        self._late_since: int | None = None
        self._told = False
        self.late = 0
        """Number of snapshots that were due while the last one was still under way."""

    def is_due(self, step: int, *, free: bool) -> bool:
        """Whether to take one after this step."""
        now_s = self._now()
        self._last = self._last or (now_s, step - 1)
        since_s = now_s - self._last[0]
        self._step_s = since_s / max(1, step - self._last[1])
        if self._every is None:
            return free and since_s >= max(self._cost_s / _SHARE, self._took_s * _SPARE)
        if step % self._every == 0 and self._late_since is None and not free:
            self._late_since, self.late = step, self.late + 1
        return free and (step % self._every == 0 or self._late_since is not None)

    def taken(self, step: int) -> None:
        self._last, self._late_since = (self._now(), step), None

    def measured(self, *, cost_s: float, took_s: float) -> None:
        """cost_s: that training lost; took_s: from the step until it was complete"""
        self._cost_s, self._took_s = cost_s, took_s

    def complaint(self) -> str | None:
        """Once, when snapshots take longer than their interval: what the interval really is, and what to set."""
        if self._told or self._every is None or self.late < _LATE or self._step_s <= 0:
            return None
        self._told = True
        fits = int(self._took_s / self._step_s) + 1
        return (
            f"warning: a snapshot takes {self._took_s:.2g} s, longer than --snapshot_every {self._every} "
            f"({self._every * self._step_s:.2g} s): one is taken about every {fits} steps; use --snapshot_every auto "
            f"or {fits}"
        )
