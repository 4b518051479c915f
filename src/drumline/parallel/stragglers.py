"""Stragglers: each rank's own work in a step, and which rank the others wait for repeatedly.

Ranks advance together, so a slow one slows all of them down, and step times do not show which one it is. What does is
the time until a rank has nothing left to do but wait. It is sent along with the loss, so it costs no extra message;
rank 0 compares.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from drumline.data import BatchPlan
from drumline.parallel.heartbeat import Pulse
from drumline.parallel.world import World

WINDOW = 50
"""Number of steps that are judged together."""
_WARM_UP = 2
"""Number of first steps that are ignored, because of compilation and other one-time setup."""
_SLOWER, _MOST_STEPS, _WORTH = 1.15, 0.8, 0.01
"""A straggler takes this many times as long as the median rank, is slower than it in this fraction of the steps, and
costs this fraction of their time."""
_STILL_SLOWER, _STILL_WORTH = 1.10, 0.005
"""A known straggler stays one until it is better than that, so that a borderline rank is not reported repeatedly."""


class Stopwatch:
    """This rank's own work in a step: data, forward and backward, until it can only wait for other ranks.

    A GPU runs asynchronously, and synchronizing would cost more than it could save: there, the time of the previous
    step is reported.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.rank, world.size
        self._began_s = self._seconds = 0.0
        self._on_wait: Callable[[], None] = lambda: None
        self._events: list[Any] = []
        if world.device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._stopped = False
        self.lap: Sequence[float] = ()
        """This rank's time by phases (`Clock.lap`), to be sent to all; at the same steps on all ranks."""

    def start(self, on_wait: Callable[[], None]) -> Stopwatch:
        """Start of a step; `on_wait` is called each time a backward of it ends."""
        self._on_wait, self._began_s = on_wait, time.perf_counter()
        if self._events:
            began, ended = self._events
            if self._stopped and ended.query():
                self._seconds = began.elapsed_time(ended) / 1000
            self._stopped = False
            began.record()
        return self

    def watch(self, loss: Tensor) -> None:
        """Stop when backward from this loss ends.

        DDP waits for the other ranks at the end of backward, in a callback that its last gradient registers. The first
        thing that backward does is to register ours, which is therefore called before DDP's.
        """
        loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def leave_out(self, seconds: float) -> None:
        """Seconds since the start that were no work of this rank. A GPU's time has them all the same."""
        self._began_s += seconds

    def slots(self, like: Tensor, *, filled: bool = True) -> Tensor:
        """float (ranks * (1 + len(lap)),) on the device of `like`: this rank's seconds and lap in its slots, else 0.

        The sum over all ranks contains every rank's time: first the work of each, then the lap of each.
        """
        slots = like.new_zeros(self._size * (1 + len(self.lap)))
        if filled:
            slots.narrow(0, self._rank, 1).fill_(self._seconds)
            for place, seconds in enumerate(self.lap, start=self._size + self._rank * len(self.lap)):
                slots.narrow(0, place, 1).fill_(seconds)
        return slots

    def _backward_begins(self, gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(self._backward_is_over)

    def _backward_is_over(self) -> None:
        if self._events:
            self._events[1].record()
            self._stopped = True
        else:
            self._seconds = time.perf_counter() - self._began_s
        self._on_wait()


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for."""

    times_median: float
    """Its own work, relative to the median rank."""
    lost_share: float
    """Fraction of step time that a median rank spent waiting for this one."""


def find_stragglers(
    works_s: Sequence[Sequence[float]],
    steps_s: Sequence[float],
    *,
    micro_batches: Sequence[int],
    known: Collection[int] = (),
) -> dict[int, Straggler]:
    """The stragglers by rank.

    works_s:       (steps, ranks) seconds of own work
    steps_s:       (steps,) seconds of the whole step
    micro_batches: (ranks,) per step, so that a rank is not blamed for having more work
    known:         stragglers so far, for which lower thresholds apply
    """
    paces = [[work_s / count for work_s, count in zip(row, micro_batches, strict=True)] for row in works_s]
    usual = [median_low(row) for row in paces]  # low: of two ranks, the slower is compared with the faster
    own = [median(column) for column in zip(*paces, strict=True)]
    due_s = [pace * max(micro_batches) for pace in usual]  # when all would be done at the median pace
    stragglers = {}
    for rank, pace in enumerate(own):
        times = pace / median_low(own)
        share = sum(max(0.0, row[rank] - due) for row, due in zip(works_s, due_s, strict=True)) / sum(steps_s)
        steps = sum(row[rank] > each for row, each in zip(paces, usual, strict=True)) / len(paces)
        is_one = times > _SLOWER and steps >= _MOST_STEPS and share >= _WORTH
        if is_one or (rank in known and times > _STILL_SLOWER and share >= _STILL_WORTH):
            stragglers[rank] = Straggler(times, share)
    return stragglers


class Pace:
    """Collects the ranks' work step by step; rank 0 reports stragglers, and when they have recovered."""

    def __init__(
        self, world: World, plan: BatchPlan, pulse: Pulse, *, tell: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._pulse, self._tell, self._judges = pulse, tell, world.is_rank0
        self._stopwatch = Stopwatch(world) if world.size > 1 else None
        self._hosts = world.gather(socket.gethostname()) if world.size > 1 else []
        self._micro_batches = [len(plan.share(rank, world.size)) for rank in range(world.size)]
        self._began_s, self._left_out = 0.0, 0
        self._works_s: list[Sequence[float]] = []
        self._steps_s: list[float] = []
        self._named: dict[int, Straggler] = {}

    def begin(self, step: int) -> Stopwatch | None:
        """Start of a step: returns what measures this rank's part of it; None for a single rank."""
        if self._stopwatch is None:
            return None
        self._began_s = time.perf_counter()
        return self._stopwatch.start(partial(self._pulse.at, "exchange", step, waits_for="the sum of the gradients"))

    def compare(self, step: int, work_s: Sequence[float]) -> None:
        """End of a step, `step` of them so far: each rank's own work, and its lap, which does not matter here."""
        work_s = work_s[: len(self._micro_batches)]
        if not self._judges or not all(work_s) or not work_s:  # a single rank, or not measured yet
            return
        if self._left_out < _WARM_UP:
            self._left_out += 1
            return
        self._works_s.append(work_s)
        self._steps_s.append(time.perf_counter() - self._began_s)
        if len(self._works_s) == WINDOW:
            self._judge(step)
            self._works_s, self._steps_s = [], []

    def _judge(self, step: int) -> None:
        stragglers = find_stragglers(self._works_s, self._steps_s, micro_batches=self._micro_batches, known=self._named)
        for rank, now in stragglers.items():
            before = self._named.get(rank)
            if before is not None and 0.5 < now.lost_share / before.lost_share < 2.0:
                stragglers[rank] = before  # already reported
                continue
            facts = {"times_median": round(now.times_median, 2), "lost_share": round(now.lost_share, 3)}
            self._tell(
                f"warning: {self._who(rank)} is a straggler: its part of a step takes {now.times_median:.2f} times as "
                f"long as the median, and {now.lost_share:.0%} of the time of the last {WINDOW} steps was spent "
                "waiting for it",
                {"event": "straggler", "step": step, "rank": rank, "host": self._hosts[rank], **facts},
            )
        for rank in self._named.keys() - stragglers.keys():
            self._tell(
                f"{self._who(rank)} is as fast as the others again",
                {"event": "straggler over", "step": step, "rank": rank, "host": self._hosts[rank]},
            )
        self._named = stragglers

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"
