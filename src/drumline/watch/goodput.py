"""Where the time of a run went: useful steps, and what took the rest.

An attempt lasts from one start of the ranks to the next. Records and events have times; from them follow the seconds
per step, and so how long an attempt took before its first step, and how much of what it computed was lost: the steps
between the one that the next attempt resumed from and the one where it failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.watch.events import number_of

Floats = npt.NDArray[np.float64]
ENDS = ("finished", "stopped", "failed")
PARTS = ("useful", "startup", "again", "down", "evaluation", "stalls")


@dataclass
class Attempt:
    """One start of the ranks. Times in seconds since 1970."""

    start: float
    step: int
    end: float = 0.0
    """The last sign of life, or the moment when it was known to have failed."""
    failed_at: int | None = None
    is_over: bool = False
    pid: Any = None
    has_started: bool = False
    """Whether it began with `started`, and not with `resumed`."""

    def is_started_by(self, resumed: dict[str, Any]) -> bool:
        """Whether `resumed` is of the process that has just started: by its pid, if the event has one."""
        return self.has_started and not self.is_over and resumed.get("pid", self.pid) == self.pid


def time_spent(
    events: list[dict[str, Any]], *, steps: Floats, times: Floats, eval_s: float, stall_s: float, now: float | None
) -> dict[str, Any] | None:
    """Seconds of each part, which add up to `total`; None if the run has no times.

    steps, times: float64 (records,) of the logged steps. now: if the run is running
    """
    known = np.isfinite(steps) & np.isfinite(times)
    steps, times = steps[known], times[known]
    events = sorted((event for event in events if event.get("at")), key=lambda event: float(event["at"]))
    attempts = _attempts(events, steps, times)
    if not attempts:
        return None
    last = max([attempts[-1].end, *times[-1:].tolist()])
    if now is not None and not attempts[-1].is_over:
        last = max(last, now)
    step_s = _seconds_per_step(steps, times)
    lost = dict.fromkeys(PARTS, 0.0)
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        _judge(attempt, following, steps, times, step_s, until=last, lost=lost)
    for event in events:
        if event["event"] == "rollback":
            lost["again"] += max(0.0, number_of(event.get("step")) - number_of(event.get("to"))) * step_s
    lost["evaluation"], lost["stalls"] = max(0.0, eval_s), max(0.0, stall_s)
    total = max(0.0, last - attempts[0].start)
    over = sum(lost.values())
    if over > total:  # estimates that are a little too long, as in a run of a few steps
        lost = {name: seconds * total / over for name, seconds in lost.items()}
    lost["useful"] = max(0.0, total - sum(lost.values()))
    return {"total": total, "step_s": step_s, "attempts": len(attempts)} | {"parts": lost}


def _attempts(events: list[dict[str, Any]], steps: Floats, times: Floats) -> list[Attempt]:
    """From `started`, or a `resumed` of another process; in runs of earlier versions also from the first record."""
    has_started = any(event["event"] == "started" for event in events)
    attempts: list[Attempt] = []
    for event in events:
        at, name = float(event["at"]), event["event"]
        if name == "resumed" and attempts and attempts[-1].is_started_by(event):
            attempts[-1].step = int(number_of(event.get("step")))
        elif name in ("started", "resumed"):
            first = int(number_of(event.get("step")))
            attempts.append(Attempt(at, first, end=at, pid=event.get("pid"), has_started=name == "started"))
        elif attempts and name == "restart":
            cause = event.get("cause")
            step = cause.get("step") if isinstance(cause, dict) else None
            attempts[-1].failed_at = int(step) if isinstance(step, int | float) else None
            attempts[-1].is_over, attempts[-1].end = True, at
        elif attempts and not attempts[-1].is_over:
            attempts[-1].end = max(attempts[-1].end, at)
            attempts[-1].is_over = name in ENDS
    firsts = [*times[:1].tolist(), *(float(event["at"]) for event in events[:1])]
    if not has_started and firsts and (not attempts or min(firsts) < attempts[0].start):
        earliest = Attempt(min(firsts), 0)
        before = [float(event["at"]) for event in events if not attempts or event["at"] < attempts[0].start]
        earliest.end = max([*before, *times[-1:].tolist()]) if not attempts else max([min(firsts), *before])
        attempts.insert(0, earliest)
    return attempts


def _seconds_per_step(steps: Floats, times: Floats) -> float:
    """The median over the records: the ones with an evaluation or a restart between them do not matter."""
    distance, took = np.diff(steps), np.diff(times)
    usable = (distance > 0) & (took >= 0)
    return float(np.median(took[usable] / distance[usable])) if usable.any() else 0.0


def _judge(
    attempt: Attempt,
    following: Attempt | None,
    steps: Floats,
    times: Floats,
    step_s: float,
    *,
    until: float,
    lost: dict[str, float],
) -> None:
    """Add what an attempt lost: before its first step, by steps that the next one computes again, and until that."""
    own = (times >= attempt.start) & (times <= (following.start if following else until))
    first = np.flatnonzero(own)[:1]
    if len(first):
        began = times[first[0]] - max(0.0, steps[first[0]] - attempt.step) * step_s
        lost["startup"] += max(0.0, min(float(began), float(times[first[0]])) - attempt.start)
    elif following is None:
        lost["startup"] += max(0.0, until - attempt.start)
        return
    if following is None:
        return
    end = max([attempt.end, *times[own][-1:].tolist()])
    kept_until = float(times[own][-1]) if own.any() else attempt.start
    kept_step = float(steps[own][-1]) if own.any() else float(attempt.step)
    since = max(0.0, end - kept_until)
    # Steps up to the one that is resumed from, after the last record that is left, were not in vain.
    useful = min(since, max(0.0, following.step - kept_step) * step_s)
    rest = since - useful
    if attempt.failed_at is not None:
        again = min(rest, max(0.0, attempt.failed_at - following.step) * step_s)
    else:
        again = rest if own.any() else 0.0
    lost["again"] += again
    lost["down" if own.any() else "startup"] += rest - again
    lost["down"] += max(0.0, following.start - end)
