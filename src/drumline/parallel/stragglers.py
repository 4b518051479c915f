"""Stragglers: each rank's own work of a step, and which rank the others wait for again and again.

Ranks go from step to step together, so that a slow one makes all of them slow and nobody's step time tells which it is.
What does is the time until a rank has nothing left to do but wait. It travels with the loss, so that telling it costs
no message of its own; rank 0 compares.
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
"""Steps that are judged together."""
_WARM_UP = 2
"""Steps that are not judged: what is compiled or loaded at its first use is no sign of anything."""
_SLOWER, _MOST_STEPS, _WORTH = 1.15, 0.8, 0.01
"""A straggler takes this many times as long as the median rank, is slower than it in this share of the steps, and costs
this share of their time."""
_STILL_SLOWER, _STILL_WORTH = 1.10, 0.005
"""One that was named is one until it is better than that, so that a rank at the edge is not told of again and again."""


class Stopwatch:
    """This rank's own work of a step: data, forward and backward, up to where it can only wait for the other ranks.

    A GPU runs behind the host, and waiting for it to catch up would cost what is to be saved: there, what is told is
    the time of the step before.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.rank, world.size
        self._began_s = self._seconds = 0.0
        self._on_wait: Callable[[], None] = lambda: None
        self._events: list[Any] = []
        if world.device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._stopped = False

    def start(self, on_wait: Callable[[], None]) -> Stopwatch:
        """A step begins; `on_wait` is called each time that a backward of it is over."""
        self._on_wait, self._began_s = on_wait, time.perf_counter()
        if self._events:
            began, ended = self._events
            if self._stopped and ended.query():
                self._seconds = began.elapsed_time(ended) / 1000
            self._stopped = False
            began.record()
        return self

    def watch(self, loss: Tensor) -> None:
        """Stop when backward from this loss is over.

        DDP waits for the other ranks at the end of backward, in a callback that its last gradient asks for. The first
        thing that backward does is to ask for ours, which is therefore called before DDP's.
        """
        loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def slots(self, like: Tensor, *, filled: bool = True) -> Tensor:
        """float (ranks,) on the device of `like`: the seconds in this rank's slot, if `filled`, and 0 elsewhere.

        The sum over all ranks is every rank's time.
        """
        slots = like.new_zeros(self._size)
        if filled:
            slots.narrow(0, self._rank, 1).fill_(self._seconds)
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
    """How long its own work takes, in what it takes the median rank."""
    lost_share: float
    """Of the time of the steps: how long a rank as fast as the median waited for this one."""


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
    micro_batches: (ranks,) of a step, so that a rank is not blamed for having more to do
    known:         ranks that were found before, of which less is asked to stay one
    """
    paces = [[work_s / count for work_s, count in zip(row, micro_batches, strict=True)] for row in works_s]
    usual = [median_low(row) for row in paces]  # the low one: of two ranks, the slower is measured by the faster
    own = [median(column) for column in zip(*paces, strict=True)]
    due_s = [pace * max(micro_batches) for pace in usual]  # when all would have done their part at the usual pace
    found = {}
    for rank, pace in enumerate(own):
        times = pace / median_low(own)
        share = sum(max(0.0, row[rank] - due) for row, due in zip(works_s, due_s, strict=True)) / sum(steps_s)
        steps = sum(row[rank] > each for row, each in zip(paces, usual, strict=True)) / len(paces)
        is_one = times > _SLOWER and steps >= _MOST_STEPS and share >= _WORTH
        if is_one or (rank in known and times > _STILL_SLOWER and share >= _STILL_WORTH):
            found[rank] = Straggler(times, share)
    return found


class Pace:
    """The work of all ranks as it comes in, step by step; rank 0 says who is a straggler, and when that is over."""

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
        """A step begins: what measures this rank's part of it; None for a single rank, which waits for nobody."""
        if self._stopwatch is None:
            return None
        self._began_s = time.perf_counter()
        return self._stopwatch.start(partial(self._pulse.at, "exchange", step, waits_for="the sum of the gradients"))

    def compare(self, step: int, work_s: Sequence[float]) -> None:
        """A step is done, `step` of them by now: what each rank's own work took."""
        if not self._judges or not all(work_s) or not work_s:  # a single rank, or a device that has not told yet
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
        found = find_stragglers(self._works_s, self._steps_s, micro_batches=self._micro_batches, known=self._named)
        for rank, now in found.items():
            before = self._named.get(rank)
            if before is not None and 0.5 < now.lost_share / before.lost_share < 2.0:
                found[rank] = before  # what was said still holds
                continue
            facts = {"times_median": round(now.times_median, 2), "lost_share": round(now.lost_share, 3)}
            self._tell(
                f"warning: {self._who(rank)} is slow: its part of a step takes {now.times_median:.2f} times as long as "
                f"the median rank's, and {now.lost_share:.0%} of the last {WINDOW} steps' time was lost waiting for it",
                {"event": "straggler", "step": step, "rank": rank, "host": self._hosts[rank], **facts},
            )
        for rank in self._named.keys() - found.keys():
            self._tell(
                f"{self._who(rank)} is as fast as the others again",
                {"event": "straggler over", "step": step, "rank": rank, "host": self._hosts[rank]},
            )
        self._named = found

    def _who(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"
