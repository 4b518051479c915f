"""Where a run starts, what its checkpoints record, and rollbacks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from drumline.checkpoint import RunState, Saver, has_begun, weights
from drumline.files import Journal
from drumline.parallel import device_name, versions
from drumline.report import Records
from drumline.train.guard import Guard
from drumline.train.setup import Intervals, Setup

if TYPE_CHECKING:
    from drumline.snapshots import Snapshots


class History:
    """Restores a run's state, and records what is saved."""

    def __init__(
        self,
        setup: Setup,
        intervals: Intervals,
        *,
        guard: Guard,
        saver: Saver,
        snapshots: Snapshots | None,
        records: Records,
        journal: Journal,
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """tell: (message, event) for the user and events.jsonl"""
        self._setup, self.intervals, self._facts = setup, intervals, setup.all_facts()
        self.folder, self.world, self._step = setup.folder, setup.world, setup.step
        self._guard, self.saver, self._snapshots = guard, saver, snapshots
        self.records, self._journal, self.tell = records, journal, tell
        self.detours: list[list[int]] = []
        parameters = dict(setup.step.model.named_parameters())
        self.statistics = [name for name in weights(setup.step.model) if name not in parameters]

    @property
    def rollbacks(self) -> int:
        return len(self.detours)

    def begin(self) -> int:
        """The step to continue with."""
        state = self.restore(self._setup.resume_from)
        if state is None and self._setup.initialize:
            self._setup.initialize()
        self.folder.began = True
        step = state.step if state else 0
        self.detours = state.detours if state else []
        on_disk = self.world.on_rank0(self.folder.checkpoint(step).exists)
        origin = {"from": "checkpoint" if on_disk or self._setup.resume_from != "auto" else "snapshot"} if state else {}
        about = {"world_size": self.world.size, "hosts": self.world.gather(socket.gethostname()), "pid": os.getpid()}
        about |= {"device": device_name(self.world.device), "versions": versions()}
        self.tell("", {"event": "resumed" if state else "started", "step": step, **origin, **about})
        if on_disk:
            self.saver.saved_step = step
        elif self._setup.resume_from != "auto" or (step == 0 and self._guard.rules.may_go_back):
            self.saver.save(self.state(step))  # so that a restart before the next save finds this run's own checkpoint
        self.status("running", step)
        self.records.flush()
        return step

    def state(self, step: int, valid_loss: float | None = None) -> RunState:
        return RunState(
            step=step,
            facts=self._facts,
            scaler=self._step.precision.scaler.state_dict(),
            detours=self.detours,
            losses=list(self._guard.losses),
            valid_loss=valid_loss,
        )

    def status(self, state: str, step: int, **more: Any) -> None:
        self._journal.status(state, step=step, total_steps=self.intervals.total_steps, **more)

    def data_step(self, step: int) -> int:
        """The step whose data is used: its own, unless rollbacks skipped data."""
        return step + sum(left_out for since, left_out in self.detours if since <= step)

    def go_back(self, step: int) -> int:
        """Return to the newest checkpoint, and skip the data of the steps since."""
        from drumline.train.trouble import go_back

        return go_back(self, step)

    def restore(self, resume_from: str) -> RunState | None:
        state = None
        if has_begun(resume_from, self.folder, self.world, self._snapshots):
            from drumline.checkpoint import resume  # not needed by a new run

            run = (self.folder, self.world, self._step.model, self._step.optimizer)
            allowed, say = self._setup.allow_change, self.records.say
            state = resume(
                resume_from, *run, facts=self._facts, allow_change=allowed, snapshots=self._snapshots, say=say
            )
        if state is not None:
            self._step.precision.scaler.load_state_dict(state.scaler)
            self._guard.losses.clear()
            self._guard.losses.extend(state.losses)
        if self.world.is_rank0:
            self.records.later(str(self.folder.metrics), lambda: self._forget_after(state.step if state else -1))
        return state

    def _forget_after(self, step: int) -> None:
        if self.folder.metrics.exists():
            from drumline.report import forget_after

            forget_after(self.folder.metrics, step, warn=self.records.say)

    def running_statistics(self) -> list[torch.Tensor]:
        """Copies of buffers that forward changes, such as BatchNorm's running averages."""
        return [self._step.model.get_buffer(name).clone() for name in self.statistics]

    def put_back(self, statistics: list[torch.Tensor]) -> None:
        for name, value in zip(self.statistics, statistics, strict=True):
            self._step.model.get_buffer(name).copy_(value)
