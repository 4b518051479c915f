"""The training loop. There is only one: GPT pretraining and any other model on any dataset go through it.

It knows steps, when something is due, and how a run starts, stops and goes on. What a step computes is in step.py,
which data it sees in batches.py, what is kept in checkpoints.py.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from drumline import checkpoints
from drumline.batches import Batches, mix
from drumline.cluster import World
from drumline.errors import CheckpointError, DrumlineError, TrainingError
from drumline.hardware import peak_flops, peak_memory_bytes
from drumline.parallel import Strategy
from drumline.records import JsonlSink, Record, Records, forget_after
from drumline.run_folder import RunFolder
from drumline.step import Objective, Precision, StepResult, train_step


@dataclass(frozen=True)
class FitResult:
    """How a call of fit() ended."""

    state: str
    """finished, or stopped (by a signal, with everything saved)."""
    step: int
    loss: float
    """Of the last step; NaN when there was none left to do."""
    weights_sha256: str
    """Fingerprint of the weights: two runs that have the same number are the same run."""


@dataclass(kw_only=True)
class Loop:
    """Takes a run from where its folder says it is to its end.

    What step k sees and draws depends on the seed and k alone, so a run that was stopped goes on as if it had not been.
    """

    folder: RunFolder
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    objective: Objective
    precision: Precision
    world: World
    strategy: Strategy
    seed: int
    lr: Callable[[int], float] | None = None
    """The learning rate of each step; None leaves the optimizer's own alone."""
    grad_clip: float = 0.0
    resume_from: str = "auto"
    allow_change: Sequence[str] = ()
    keep_checkpoints: int = 3
    max_nonfinite: int = 5
    facts: dict[str, Any] = field(default_factory=dict)
    """What must not change while a run goes on, beside what every run has."""
    flops_per_item: float | None = None
    records: Records | None = None
    """Where to report; None: the run folder and the console."""

    def __post_init__(self) -> None:
        plan = self.batches.plan
        self.facts = {
            "seed": self.seed,
            "global_batch_size": plan.sequences,
            "batch_size": plan.micro_batch,
            "items_per_epoch": self.batches.items,
            **self.facts,
        }
        self._nonfinite_in_a_row = self._skipped_steps = 0
        self._began = False

    def run(
        self,
        *,
        total_steps: int,
        log_every: int,
        save_every: Fraction,
        eval_every: int,
        evaluate: Callable[[], Record] | None = None,
    ) -> FitResult:
        """Train until `total_steps`; intervals are in steps, and a fractional one is due at the first step past it."""
        last = total_steps
        with self._reporting(last) as records, _stop_signals() as stop:
            step = saved = self._resume(records)
            self._status("running", step, last)
            result, speed = None, _Speed(step)
            while step < last and not (result and result.stop):
                result = self._step(step, stop.is_set())
                step += 1
                self._check_finite(step, result, records)
                if due(step, Fraction(log_every), last):
                    records.write(self._record(step, result, speed, last))
                with speed.paused():
                    if evaluate and due(step, Fraction(eval_every), last):
                        records.write({"step": step, **evaluate()})
                    if due(step, save_every, last):
                        saved = self._save(step, last)
            if step > saved:
                self._save(step, last)
            return self._end(step, last, result)

    def _step(self, step: int, vote_to_stop: bool) -> StepResult:
        return train_step(
            self.model,
            self.optimizer,
            self._micro_batches(step),
            self.objective,
            self.strategy,
            weight=self.batches.plan.sequences * self.batches.weight,
            precision=self.precision,
            lr=self.lr(step) if self.lr else None,
            grad_clip=self.grad_clip,
            vote_to_stop=vote_to_stop,
        )

    def _micro_batches(self, step: int) -> Iterator[Any]:
        self.model.train()
        for index in self.batches.plan.share(self.world.rank, self.world.size):
            # Every random draw of a micro-batch, its data's and its dropout's, is keyed by where it stands in the run.
            torch.manual_seed(mix(self.seed, step, index))
            yield self.batches.micro_batch(step, index)

    def _resume(self, records: Records) -> int:
        """Rank 0 reads the checkpoint and gives it to the others: they need not see its disk."""
        found = self.world.on_main(lambda: self._read_checkpoint(records))
        if found is None:
            return 0
        checkpoints.share(self.model, self.optimizer, self.world)
        self.precision.scaler.load_state_dict(found["scaler"])
        return int(found["step"])

    def _read_checkpoint(self, records: Records) -> dict[str, Any] | None:
        found = checkpoints.find(self.resume_from, self.folder, warn=records.say)
        forget_after(self.folder.metrics, found.step if found else -1)
        if found is None:
            return None
        self._check_same_run(found)
        checkpoints.load(found, model=self.model, optimizer=self.optimizer)
        records.say(f"going on from {found.path} (step {found.step:,})")
        return {"step": found.step, "scaler": found.scaler}

    def _check_same_run(self, found: checkpoints.Checkpoint) -> None:
        changed = [
            f"{name} {found.facts.get(name)} -> {value}"
            for name, value in self.facts.items()
            if found.facts.get(name) != value and name not in self.allow_change
        ]
        if changed:
            raise CheckpointError(
                f"{found.path} is of a run with other settings ({'; '.join(changed)})",
                fix="give the same settings to go on with it, or start anew in another run_dir",
            )

    def _save(self, step: int, last: int) -> int:
        if not self.world.is_main:
            return step
        checkpoints.save(
            self.folder,
            step=step,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.precision.scaler.state_dict(),
            facts=self.facts,
        )
        checkpoints.prune(self.folder, keep=self.keep_checkpoints)
        self._status("running", step, last)
        return step

    def _status(self, state: str, step: int, last: int, **more: Any) -> None:
        if self.world.is_main:
            self.folder.write_status(state, step=step, total_steps=last, **more)
            self._began = True

    def _end(self, step: int, last: int, result: StepResult | None) -> FitResult:
        state = "finished" if step >= last else "stopped"
        sha256 = checkpoints.weights_sha256(self.model)
        self._status(state, step, last, weights_sha256=sha256, skipped_steps=self._skipped_steps)
        return FitResult(state, step, result.loss if result else math.nan, sha256)

    def _check_finite(self, step: int, result: StepResult, records: Records) -> None:
        """Count the steps that were skipped; give up when too many come in a row."""
        scaler = self.precision.scaler
        if result.updated or (math.isfinite(result.loss) and scaler.is_enabled() and scaler.get_scale() >= 1.0):
            # An overflow while float16's scaler looks for its scale is its way of working, not a fault.
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        self._skipped_steps += 1
        what = f"step {step:,}: loss {result.loss}, gradient norm {result.grad_norm}"
        records.say(f"warning: {what}: not finite, the step was skipped")
        if self._nonfinite_in_a_row >= self.max_nonfinite:
            names = self.batches.names(step - 1)
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            error = TrainingError(
                f"{what}, {self._nonfinite_in_a_row} such steps in a row; the last one's documents: {shown}",
                fix="lower --lr, use --dtype bfloat16 or float32, or take those documents out",
            )
            error.told = not self.world.is_main  # every rank sees the same numbers
            raise error

    def _record(self, step: int, result: StepResult, speed: _Speed, last: int) -> Record:
        plan, weight = self.batches.plan, self.batches.weight
        steps_per_s = speed.lap(step)
        rate = "tokens_per_s" if weight > 1 else "samples_per_s"
        record: Record = {
            "step": step,
            "loss": result.loss,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": result.grad_norm,
            rate: steps_per_s * plan.sequences * weight,
            "epoch": step * plan.sequences / self.batches.items,
            "eta_s": (last - step) / steps_per_s,
            "peak_memory_bytes": peak_memory_bytes(self.precision.device),
        }
        peak = peak_flops(self.precision.device, self.precision.dtype)
        if self.flops_per_item and peak:
            record["mfu"] = steps_per_s * plan.sequences * self.flops_per_item / (peak * self.world.size)
        if self._skipped_steps:
            record["skipped_steps"] = self._skipped_steps
        return record

    @contextmanager
    def _reporting(self, last: int) -> Iterator[Records]:
        """Rank 0's records while the loop runs, and a status that names the cause if it fails."""
        if not self.world.is_main:
            yield Records([], log=None, silent=True)
            return
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        records = self.records or Records([JsonlSink(self.folder.metrics)], log=self.folder.log)
        records.start_progress(last)
        try:
            yield records
        except BaseException as error:
            if self._began:  # a start that was refused changes nothing about the run
                cause = error.problem if isinstance(error, DrumlineError) else f"{type(error).__name__}: {error}"
                self._status("failed", self.folder.read_status().get("step", 0), last, cause=cause)
            raise
        finally:
            records.stop_progress()
            if records is not self.records:
                records.close()


def due(step: int, every: Fraction, last: int) -> bool:
    """Whether `step`, counted from 1, is the first to reach a multiple of `every`, or the last."""
    return step == last or step // every > (step - 1) // every


class _Speed:
    """Steps per second between two records, without the time spent evaluating and saving."""

    def __init__(self, step: int) -> None:
        self._step, self._since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        now = time.perf_counter()
        rate = (step - self._step) / max(1e-9, now - self._since)
        self._step, self._since = step, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM ask the loop to stop after the current step; a second one stops at once, as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(signum: int, frame: Any) -> None:
        stop.set()
        signal.signal(signum, before[signum])

    before: dict[int, Any] = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    for signum in before:
        signal.signal(signum, ask)
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
