"""The training loop. There is only one: GPT pretraining and any other model on any dataset go through it.

It knows steps, when something is due, and how a run starts, stops and goes on. What a step computes is in step.py,
which data it sees in batches.py, what is kept in checkpoints.py, what is done about wrong numbers in guard.py.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from drumline.checkpoint import Retention, RunState, Saver, find_snapshots, resume, valid_ones, weights, weights_sha256
from drumline.data import Batches, mix
from drumline.errors import DrumlineError, TrainingError
from drumline.files import LineFile, RunFolder
from drumline.parallel import (
    Pace,
    Strategy,
    World,
    is_supervised,
    own_pulse,
    peak_flops,
    peak_memory_bytes,
    versions,
    waiting_for,
)
from drumline.report import JsonlSink, Record, Records, Speed, forget_after
from drumline.signals import stopping
from drumline.train.guard import Guard, GuardRules, ReplicaDriftError, Verdict
from drumline.train.step import Gradient, Objective, Precision, StepResult, compute_gradient, update


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
    retention: Retention = field(default_factory=Retention)
    guard_rules: GuardRules = field(default_factory=GuardRules)
    snapshot_every: int = 0
    """Steps between copies of the run in memory; 0: none."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What must not change while a run goes on, beside what every run has."""
    config_sha256: str = ""
    """Of the settings, for the checkpoints' manifests."""
    flops_per_item: Callable[[int], float] | None = None
    """Of each step."""
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
        parameters = dict(self.model.named_parameters())
        self._statistic_names = [name for name in weights(self.model) if name not in parameters]
        self._began = self._warm = False
        self._detours: list[list[int]] = []
        self._ahead: dict[int, Gradient] = {}
        self.pulse = own_pulse()

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
        last, self._save_every = total_steps, save_every
        self._last = last
        with self._reporting() as records, stopping(supervised=is_supervised()) as stop, self._saving(records) as saver:
            step = self._resume(saver, records)
            result, speed = None, Speed(step)
            while step < last and not (result and result.stop):
                result = self._step(step, stop=stop.is_set(), save=saver.wants_to_retry())
                back = self._judged(step, result, saver, records)
                if back is not None:
                    step, speed = back, Speed(back)
                    continue
                step += 1
                if due(step, Fraction(log_every), last):
                    records.write(self._record(step, result, speed))
                saves = due(step, save_every, last) or result.save
                snapshots = self.snapshot_every > 0 and step % self.snapshot_every == 0
                judges = evaluate is not None and due(step, Fraction(eval_every), last)
                if saves or snapshots or judges:
                    self._wait_for_the_device()  # what it computes ahead is no part of the pause
                with speed.paused():
                    found: Record = {}
                    if evaluate and judges:
                        self.pulse.at("evaluate", step)
                        found = evaluate()
                        records.write({"step": step, **found})
                    self._compare_replicas(step, keeps=saves or snapshots)
                    if saves:
                        self.pulse.at("save", step)
                        saver.save(self._state(step, found.get("valid_loss")))
                    elif snapshots:
                        saver.snapshot(self._state(step))
                saver.poll()
            return self._end(step, result, saver, stop)

    def _step(self, step: int, *, stop: bool, save: bool) -> StepResult:
        before = [statistic.clone() for statistic in self._statistics()]
        gradient = self._ahead.pop(step, None) or self._gradient(step, stop=stop, save=save)
        self._ahead.clear()
        lr = self.lr(step) if self.lr else None
        read = update(self.model, self.optimizer, gradient, precision=self.precision, lr=lr, grad_clip=self.grad_clip)
        if self.strategy.looks_ahead and step + 1 < self._last and not stop:
            # The device goes from this step to the next without a pause; one that was in vain is computed again.
            with suppress(Exception):  # it will be raised where that step is due, with this one safe
                self._ahead[step + 1] = self._gradient(step + 1, stop=False, save=False)
        result = read()
        result = replace(result, stop=result.stop or stop, save=result.save or save)
        self._pace.compare(step + 1, result.work_s)
        if not result.updated:
            for statistic, value in zip(self._statistics(), before, strict=True):
                statistic.copy_(value)
        return result

    def _wait_for_the_device(self) -> None:
        if self._ahead and self.precision.device.type == "cuda":
            torch.cuda.synchronize(self.precision.device)

    def _gradient(self, step: int, *, stop: bool, save: bool) -> Gradient:
        return compute_gradient(
            self.model,
            self.optimizer,
            self._micro_batches(step),
            self.objective,
            self.strategy,
            weight=self.batches.plan.sequences * self.batches.weight,
            precision=self.precision,
            vote_to_stop=stop,
            vote_to_save=save,
            watch=self._pace.begin(step),
        )

    def _statistics(self) -> list[torch.Tensor]:
        """What a forward changes: batch norm's running means, and the like."""
        return [self.model.get_buffer(name) for name in self._statistic_names]

    def _micro_batches(self, step: int) -> Iterator[Any]:
        self.model.train()
        data_step = self._data_step(step)
        for index in self.batches.plan.share(self.world.rank, self.world.size):
            self.pulse.at("data", step)
            # Every random draw of a micro-batch, its data's and its dropout's, is keyed by where it stands in the run.
            torch.manual_seed(mix(self.seed, data_step, index))
            batch = self.batches.micro_batch(data_step, index)
            # What is compiled or loaded at its first use may take its time.
            self.pulse.at("compute" if self._warm else "compiling", step)
            yield batch
        self.pulse.at("exchange" if self._warm else "compiling", step)
        self._warm = True

    def _data_step(self, step: int) -> int:
        """Whose data a step takes: its own, but for what rollbacks have left out."""
        return step + sum(left_out for since, left_out in self._detours if since <= step)

    def _judged(self, step: int, result: StepResult, saver: Saver, records: Records) -> int | None:
        """Where to go on instead of the next step; None: the step is done."""
        verdict = self._guard.judge(step, self._data_step(step), result, rollbacks=len(self._detours))
        if verdict is Verdict.AGAIN:
            return step
        return self._go_back(step, saver, records) if verdict is Verdict.BACK else None

    def _go_back(self, step: int, saver: Saver, records: Records) -> int:
        """To the newest checkpoint, and from there on without the data of the steps since."""
        saver.wait()
        saver.forget_snapshots()
        self._ahead.clear()
        found = self._restore(self.world.on_main(lambda: self._where_to_go_back(records)), records)
        assert found is not None  # a run that may go back saves before its first step
        saver.saved_step = found.step
        left_out = self._data_step(step) + 1 - self._data_step(found.step)
        self._detours.append([found.step, left_out])
        self._tell(
            f"went back from step {step + 1:,} to {found.step:,}; the data of {left_out} steps are left out",
            {"event": "rollback", "step": step + 1, "to": found.step, "left_out_steps": left_out},
        )
        return found.step

    def _where_to_go_back(self, records: Records) -> str:
        """The newest step that was due to be saved: where a run was stopped by a signal must not decide its course."""
        valid = valid_ones(self.folder.checkpoints, warn=records.say)
        return next((str(found.step) for found in valid if due(found.step, self._save_every, 0)), "auto")

    def _resume(self, saver: Saver, records: Records) -> int:
        """The step to go on with."""
        self.pulse.at("starting", 0)
        found = self._restore(self.resume_from, records)
        step = found.step if found else 0
        self._detours = found.detours if found else []
        if self.world.on_main(self.folder.checkpoint(step).exists):
            saver.saved_step = step
        elif self.resume_from != "auto" or (step == 0 and self.guard_rules.may_go_back):
            saver.save(self._state(step))  # should the run break before its next save, it finds its own way back
        self._status("running", step)
        return step

    def _restore(self, resume_from: str, records: Records) -> RunState | None:
        found = resume(
            resume_from,
            self.folder,
            self.world,
            self.model,
            self.optimizer,
            facts=self.facts,
            allow_change=self.allow_change,
            snapshots=self._snapshots,
            say=records.say,
        )
        if found is not None:
            self.precision.scaler.load_state_dict(found.scaler)
            self._guard.losses.clear()
            self._guard.losses.extend(found.losses)
        if self.world.is_main:
            records.attempt(
                str(self.folder.metrics), lambda: forget_after(self.folder.metrics, found.step if found else -1)
            )
        return found

    def _state(self, step: int, valid_loss: float | None = None) -> RunState:
        return RunState(
            step=step,
            facts=self.facts,
            scaler=self.precision.scaler.state_dict(),
            detours=self._detours,
            losses=list(self._guard.losses),
            valid_loss=valid_loss,
        )

    def _compare_replicas(self, step: int, *, keeps: bool) -> None:
        """keeps: whether the state is about to be saved: a replica that drifted must not get into a checkpoint"""
        every = self.guard_rules.check_replicas_every
        if keeps or (every and step % every == 0):
            # Each rank has statistics of its own data until the next forward, where DDP takes rank 0's; so do we.
            with waiting_for("rank 0's statistics"):
                self.world.broadcast(self._statistics())
            self._guard.compare_replicas(self.model, step)

    def _end(self, step: int, result: StepResult | None, saver: Saver, stop: threading.Event) -> FitResult:
        self.pulse.at("ending", step)
        self._compare_replicas(step, keeps=True)
        saver.finish(self._state(step), give_up=stop.is_set)
        saver.forget_snapshots()
        state = "finished" if step >= self._last else "stopped"
        sha256 = weights_sha256(self.model)
        self._status(state, step, weights_sha256=sha256, skipped_steps=self._guard.skipped_steps)
        return FitResult(state, step, result.loss if result else math.nan, sha256)

    def _tell(self, message: str, event: dict[str, Any]) -> None:
        """To people, if there is a message, and to events.jsonl; rank 0 tells for all."""
        if not self.world.is_main:
            return
        if message:
            self._out.say(message)
        line = json.dumps({**event, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        self._out.attempt(str(self.folder.events), lambda: self._events.append(line))
        if event["event"] == "saved":
            self._status("running", event["step"])

    def _status(self, state: str, step: int, **more: Any) -> None:
        if self.world.is_main:
            self._out.attempt(
                str(self.folder.status),
                lambda: self.folder.write_status(state, step=step, total_steps=self._last, **more),
            )
            self._began = True

    def _record(self, step: int, result: StepResult, speed: Speed) -> Record:
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
            "eta_s": (self._last - step) / steps_per_s,
            "peak_memory_bytes": peak_memory_bytes(self.precision.device),
        }
        peak = peak_flops(self.precision.device, self.precision.dtype)
        if self.flops_per_item and peak:
            record["mfu"] = steps_per_s * plan.sequences * self.flops_per_item(step - 1) / (peak * self.world.size)
        if self._guard.skipped_steps:
            record["skipped_steps"] = self._guard.skipped_steps
        return record

    @contextmanager
    def _saving(self, records: Records) -> Iterator[Saver]:
        self._out, self._events = records, LineFile(self.folder.events)
        self._guard = Guard(self.guard_rules, self.world, self.batches, self.precision, tell=self._tell)
        self._pace = Pace(self.world, self.batches.plan, self.pulse, tell=self._tell)
        self._snapshots = find_snapshots(self.folder, self.world, takes=self.snapshot_every > 0)
        saver = Saver(
            self.folder,
            self.world,
            self.model,
            self.optimizer,
            retention=self.retention,
            snapshots=self._snapshots,
            takes_snapshots=self.snapshot_every > 0,
            about={"config_sha256": self.config_sha256, "versions": versions()},
            tell=self._tell,
            waiting=self.pulse.still_there,
        )
        try:
            yield saver
        except (TrainingError, ReplicaDriftError):
            saver.wait()  # every rank raises these at the same step: what is being written is good, and soon whole
            raise
        finally:
            saver.close()

    @contextmanager
    def _reporting(self) -> Iterator[Records]:
        """Rank 0's records while the loop runs, and a status that names the cause if it fails."""
        if not self.world.is_main:
            yield Records([], log=None, silent=True)
            return
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        records = self.records or Records([JsonlSink(self.folder.metrics)], log=self.folder.log)
        records.start_progress(self._last)
        try:
            yield records
        except BaseException as error:
            if self._began:  # a start that was refused changes nothing about the run
                cause = error.problem if isinstance(error, DrumlineError) else f"{type(error).__name__}: {error}"
                self._status("failed", self.folder.read_status().get("step", 0), cause=cause)
            raise
        finally:
            records.stop_progress()
            if records is not self.records:
                records.close()


def due(step: int, every: Fraction, last: int) -> bool:
    """Whether `step`, counted from 1, is the first to reach a multiple of `every`, or the last."""
    return step == last or step // every > (step - 1) // every
