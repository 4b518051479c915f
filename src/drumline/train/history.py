"""Where a run starts, what its checkpoints record, and rollbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from drumline.checkpoint import RunState, Saver, has_begun, weights
from drumline.files import Journal
from drumline.parallel import waiting_for
from drumline.report import Records
from drumline.train.guard import Guard
from drumline.train.setup import Intervals, Setup

if TYPE_CHECKING:
    from drumline.checkpoint import Snapshots


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
        self._setup, self._intervals, self._facts = setup, intervals, setup.all_facts()
        self._folder, self._world, self._step = setup.folder, setup.world, setup.step
        self._guard, self._saver, self._snapshots = guard, saver, snapshots
        self._records, self._journal, self._tell = records, journal, tell
        self._detours: list[list[int]] = []
        parameters = dict(setup.step.model.named_parameters())
        self._statistics = [name for name in weights(setup.step.model) if name not in parameters]

    @property
    def rollbacks(self) -> int:
        return len(self._detours)

    def begin(self) -> int:
        """The step to continue with."""
        state = self._restore(self._setup.resume_from)
        self._folder.began = True
        step = state.step if state else 0
        self._detours = state.detours if state else []
        if state:
            self._journal.event("resumed", step=step)
        if self._world.on_rank0(self._folder.checkpoint(step).exists):
            self._saver.saved_step = step
        elif self._setup.resume_from != "auto" or (step == 0 and self._guard.rules.may_go_back):
            self._saver.save(self.state(step))  # so that a restart before the next save finds this run's own checkpoint
        self.status("running", step)
        return step

    def state(self, step: int, valid_loss: float | None = None) -> RunState:
        return RunState(
            step=step,
            facts=self._facts,
            scaler=self._step.precision.scaler.state_dict(),
            detours=self._detours,
            losses=list(self._guard.losses),
            valid_loss=valid_loss,
        )

    def status(self, state: str, step: int, **more: Any) -> None:
        self._journal.status(state, step=step, total_steps=self._intervals.total_steps, **more)

    def data_step(self, step: int) -> int:
        """The step whose data is used: its own, unless rollbacks skipped data."""
        return step + sum(left_out for since, left_out in self._detours if since <= step)

    def go_back(self, step: int) -> int:
        """Return to the newest checkpoint, and skip the data of the steps since."""
        from drumline.train.trouble import rolled_back, step_to_go_back_to

        self._saver.wait()
        self._saver.forget_snapshots()
        where = partial(step_to_go_back_to, self._folder, self._intervals.save_every, warn=self._records.say)
        state = self._restore(self._world.on_rank0(where))
        assert state is not None  # a run that may roll back saves before its first step
        self._saver.saved_step = state.step
        left_out = self.data_step(step) + 1 - self.data_step(state.step)
        self._detours.append([state.step, left_out])
        self._tell(*rolled_back(step + 1, state.step, left_out))
        return state.step

    def _restore(self, resume_from: str) -> RunState | None:
        state = None
        if has_begun(resume_from, self._folder, self._world, self._snapshots):
            from drumline.checkpoint import resume  # not needed by a new run

            run = (self._folder, self._world, self._step.model, self._step.optimizer)
            allowed, say = self._setup.allow_change, self._records.say
            state = resume(
                resume_from, *run, facts=self._facts, allow_change=allowed, snapshots=self._snapshots, say=say
            )
        if state is not None:
            self._step.precision.scaler.load_state_dict(state.scaler)
            self._guard.losses.clear()
            self._guard.losses.extend(state.losses)
        metrics = self._folder.metrics
        if self._world.is_rank0 and metrics.exists():
            from drumline.report import forget_after

            step, warn = state.step if state else -1, self._records.say
            self._records.attempt(str(metrics), lambda: forget_after(metrics, step, warn=warn))
        return state

    def running_statistics(self) -> list[torch.Tensor]:
        """Copies of buffers that forward changes, such as BatchNorm's running averages."""
        return [self._step.model.get_buffer(name).clone() for name in self._statistics]

    def put_back(self, statistics: list[torch.Tensor]) -> None:
        for name, value in zip(self._statistics, statistics, strict=True):
            self._step.model.get_buffer(name).copy_(value)

    def share_statistics(self) -> None:
        """Each rank has its own statistics until the next forward, when DDP broadcasts rank 0's; so do we."""
        with waiting_for("rank 0's buffers"):
            self._world.broadcast([self._step.model.get_buffer(name) for name in self._statistics])
