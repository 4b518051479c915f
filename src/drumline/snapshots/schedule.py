"""When a snapshot is due: at fixed intervals, or as often as costs little of the training time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_SHARE = 0.01
"""Of the training time, for all that snapshots cost, if the interval is not given."""
_SPARE = 1.25
"""Snapshots that are not due at fixed intervals leave some time between one and the next."""
_LEAST_S = 0.25
"""Between two that are not due at fixed intervals: more would save nobody anything, and each is an event."""
_LATE = 3
"""So many snapshots have to be late before that is reported."""
_ROUNDING = 2
"""Steps by which a killed rank may cost more than the interval."""


class Schedule:
    """Of rank 0, which decides for all.

    every: steps that a killed rank may cost; None: by what snapshots cost. One that takes many steps until it is
        complete is taken earlier by as many.
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
        since_s, since = now_s - self._last[0], step - self._last[1]
        if self._every is None:
            least_s = _LEAST_S if self._took_s else 0.0
            return free and since_s >= max(self._cost_s / _SHARE, self._took_s * _SPARE, least_s)
        early = max(0, self._steps_under_way() - _ROUNDING)
        due = since >= self._every - early if early else step % self._every == 0
        if due and self._late_since is None and not free:
            self._late_since, self.late = step, self.late + 1
        return free and (due or self._late_since is not None)

    def taken(self, step: int) -> None:
        now_s = self._now()
        if self._last is not None and step > self._last[1]:
            self._step_s = (now_s - self._last[0]) / (step - self._last[1])
        self._last, self._late_since = (now_s, step), None

    def measured(self, *, cost_s: float, took_s: float) -> None:
        """cost_s: that training lost; took_s: from the step until it was complete"""
        self._cost_s, self._took_s = cost_s, took_s

    def complaint(self) -> str | None:
        """Once, when snapshots take so long that a killed rank may cost more than is promised: what to set."""
        if self._told or self._every is None or self.late < _LATE or self._step_s <= 0:
            return None
        steps = self._steps_under_way()
        worst = 2 * steps + 1  # it is decided before a step whether to take one after it
        if worst <= self._every + _ROUNDING:
            return None
        self._told = True
        return (
            f"warning: a snapshot takes {self._took_s:.2g} s ({steps} steps) and begins when the last one is complete: "
            f"a killed rank may cost {worst} steps, more than --snapshot_every {self._every}; use --snapshot_every "
            f"auto or {worst}"
        )

    def _steps_under_way(self) -> int:
        """Steps until a snapshot is complete."""
        return math.ceil(self._took_s / self._step_s) if self._step_s > 0 else 0
