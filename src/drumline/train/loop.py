"""The training loop. There is only one, for GPT pretraining and for any other model on any dataset.

It knows steps and when something is due. What a step computes is in step.py, resuming and rollbacks in history.py, the
handling of NaN, Inf and loss spikes in guard.py, and assembly.py builds all of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from drumline.checkpoint import Saver, weights_fingerprint, weights_sha256
from drumline.data import mix
from drumline.parallel import Pulse, peak_flops, peak_memory_bytes
from drumline.report import Record, Records, Speed
from drumline.train.guard import Guard, Verdict
from drumline.train.history import History
from drumline.train.setup import Intervals, Setup
from drumline.train.step import NO_VOTES, Gradient, StepResult, Votes

if TYPE_CHECKING:
    from drumline.parallel import Pace


_TIMED = 4
"""Number of steps after which a long run prints its estimated duration."""


@dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    state: str
    """finished, or stopped (by a signal, with everything saved)."""
    step: int
    loss: float
    """Loss of the last step; NaN if there was none left to do."""
    weights_sha256: str
    """Hash of the weights: runs with the same hash have bitwise identical weights."""


@dataclass(kw_only=True)
class Loop:
    """Takes a run from its current step to its end; made by `assembly.assembled`.

    The data and random numbers of step k depend on the seed and k alone, so a resumed run is as if never stopped.
    """

    setup: Setup
    intervals: Intervals
    history: History
    saver: Saver
    guard: Guard
    records: Records
    lanes: Callable[[int, Sequence[float], Sequence[float]], None]
    """Records where the time of the ranks went: (step, StepResult.work_s, own lap)."""
    pulse: Pulse
    pace: Pace | None
    """Compares the ranks' times; None for a single rank."""
    stop: threading.Event
    """Set when this process is asked to stop."""
    compare_replicas: Callable[[int], None] | None
    """Raises if the ranks' weights differ; None for a single rank."""
    evaluate: Callable[[], Record] | None
    _lap: Sequence[float] = ()
    _ahead: dict[int, Gradient] = field(default_factory=dict, init=False)
    _warm: bool = field(default=False, init=False)

    def run(self) -> FitResult:
        """Train until the last step, or until a rank is asked to stop."""
        step = first = self.history.begin()
        last, result, speed = self.intervals.total_steps, None, Speed(step)
        while step < last and not (result and result.votes.stop):
            result = self._step(step)
            back = self._judged(step, result)
            if back is not None:
                step, speed = back, Speed(back)
                continue
            step += 1
            self.records.at(step)
            self.setup.stepped(step, result)
            if step == first + _TIMED:
                from drumline.train.length import say_how_long

                say_how_long(self.records, self.setup.folder, last - step, speed.rate(step))
            if self.intervals.logs(step):
                self.records.write(self._record(step, result, speed))
                self.lanes(step, result.work_s, self._lap)
            if step == first + 1:
                speed = Speed(step)  # the first steps include compilation and other setup
            evaluates = self.evaluate is not None and self.intervals.evaluates(step)
            if evaluates or result.votes.save or result.votes.snapshot or self.intervals.compares(step):
                with speed.paused():
                    self._look_up(step, result, evaluates=evaluates)
            self.saver.poll()
        return self._end(step, result)

    def _step(self, step: int) -> StepResult:
        setup, saves = self.setup, self.saver.wants_to_save(step + 1, due=self.intervals.saves(step + 1))
        votes = Votes(self.stop.is_set() or self.saver.has_no_folder, saves, self.saver.wants_snapshot(step + 1))
        before = self.history.running_statistics()
        gradient = self._ahead.pop(step, None) or self._gradient(step, votes)
        self._ahead.clear()
        read = setup.step.update(gradient, lr=setup.lr(step) if setup.lr else None)
        if setup.step.backward.runs_ahead and step + 1 < self.intervals.total_steps and not votes.stop:
            # Start the next step before reading this one's loss: the device never idles. If in vain, it is recomputed.
            with suppress(Exception):  # it will be raised again when that step is due, with this one complete
                self._ahead[step + 1] = self._gradient(step + 1, NO_VOTES)
        result = read()
        self.pulse.clock.enter("other")
        # What was started ahead came without them.
        result = replace(result, votes=Votes(*map(max, votes, result.votes)))
        if self.pace is not None:
            self.pace.compare(step + 1, result.work_s)
        if not result.updated:
            self.history.put_back(before)
        return result

    def _gradient(self, step: int, votes: Votes) -> Gradient:
        watch = self.pace.begin(step) if self.pace is not None else None
        self._lap = self.pulse.clock.lap() if self.intervals.logs(step + 1) else ()
        if watch is not None:
            watch.lap = self._lap
        return self.setup.step.gradient(self._micro_batches(step), votes=votes, watch=watch)

    def _micro_batches(self, step: int) -> Iterator[Any]:
        batches, world, data_step = self.setup.batches, self.setup.world, self.history.data_step(step)
        self.setup.step.model.train()
        for index in batches.plan.share(world.rank, world.size):
            self.pulse.at("data", step)
            # All random numbers of a micro-batch, for data and dropout, are keyed by its position in the run.
            torch.manual_seed(mix(self.setup.seed, data_step, index))
            batch = batches.micro_batch(data_step, index)
            # Compiling or loading something on first use may take long.
            self.pulse.at("compute" if self._warm else "compiling", step)
            yield batch
        self.pulse.at("exchange" if self._warm else "compiling", step)
        self._warm = True

    def _judged(self, step: int, result: StepResult) -> int | None:
        """The step to continue with instead of the next one; None: the step is done."""
        data_step = self.history.data_step(step)
        verdict = self.guard.judge(step, data_step, result, rollbacks=self.history.rollbacks)
        if verdict is Verdict.AGAIN:
            return step
        if verdict is Verdict.BACK:
            self._ahead.clear()
            return self.history.go_back(step)
        return None

    def _look_up(self, step: int, result: StepResult, *, evaluates: bool) -> None:
        """Between two steps: evaluate, compare the ranks' weights, save."""
        held_out: Record = {}
        if evaluates and self.evaluate:
            self.pulse.at("evaluate", step)
            began_s = time.perf_counter()
            held_out = self.evaluate()
            self.setup.evaluated(step)
            self.records.write({"step": step, **held_out, "eval_s": round(time.perf_counter() - began_s, 3)})
        _, saves, snapshots = result.votes
        if self.compare_replicas and (saves or snapshots or self.intervals.compares(step)):
            self.compare_replicas(step)  # a replica with different weights must not get into a checkpoint
        if saves or snapshots:
            self.pulse.at("save", step)
            state = self.history.state(step, held_out.get("valid_loss"))
            self.saver.save(state, on_disk=saves, in_memory=snapshots)

    def _end(self, step: int, result: StepResult | None) -> FitResult:
        self.pulse.at("ending", step)
        if self.compare_replicas:
            self.compare_replicas(step)
        self.saver.finish(self.history.state(step), give_up=self.stop.is_set)
        self.saver.forget_snapshots()
        state = "finished" if step >= self.intervals.total_steps else "stopped"
        sha256 = weights_sha256(self.setup.step.model)
        self.history.status(state, step, weights_sha256=sha256, skipped_steps=self.guard.skipped_steps)
        return FitResult(state, step, result.loss if result else math.nan, sha256)

    def _record(self, step: int, result: StepResult, speed: Speed) -> Record:
        setup, steps_per_s = self.setup, speed.lap(step)
        batches, precision, items = setup.batches, setup.step.precision, setup.batches.plan.sequences
        rate = "tokens_per_s" if batches.tokens_per_item > 1 else "samples_per_s"
        record: Record = {
            "step": step,
            "loss": result.loss,
            **dict(result.more),
            "lr": setup.step.optimizer.param_groups[0]["lr"],
            "grad_norm": result.grad_norm,
            rate: steps_per_s * items * batches.tokens_per_item,
            "tokens": step * items * batches.tokens_per_item,
            "epoch": step * items / batches.items,
            "eta_s": (self.intervals.total_steps - step) / steps_per_s,
            "peak_memory_bytes": peak_memory_bytes(precision.device),
            "fingerprint": weights_fingerprint(setup.step.model),
        }
        peak = peak_flops(precision.device, precision.dtype)
        if setup.flops_per_item and peak:
            record["mfu"] = steps_per_s * items * setup.flops_per_item(step - 1) / (peak * setup.world.size)
        if self.guard.skipped_steps:
            record["skipped_steps"] = self.guard.skipped_steps
        return record
