"""Saving in the background: copy the state, let a thread write it, never lose the previous checkpoint.

The loop pauses only while the state is copied to a buffer (only what this rank writes; pinned for a GPU). Of several
ranks each writes a part (parts.py; its own rows, if the state is spread over them), and rank 0 completes the checkpoint
with one rename. A failed save is reported at the next step, the run continues, and it is retried (trouble.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drumline.checkpoint.checkpoints import Checkpoint, RunState, commit
from drumline.checkpoint.retention import Retention, prune
from drumline.checkpoint.state import optimizer_state, tensors_of
from drumline.checkpoint.storage import FileFacts, write_tensors
from drumline.files import RunFolder
from drumline.parallel import World, waiting_for

if TYPE_CHECKING:
    from drumline.checkpoint.in_memory import InMemory
    from drumline.checkpoint.parts import Parts
    from drumline.snapshots import Snapshots

_RETRY_S = (2.0, 60.0)
"""The first pause before a failed save is retried, and the longest; each is twice the previous one."""
_SMALL_BYTES, _PATIENCE_S, _SHARE = 64 << 20, 1.0, 0.01
"""Training waits for the last save only if it is that small: in all for so long, beside a share of the time between."""
_LAST_TRIES = 3
"""How often a run that was asked to stop tries to save before it gives up; a finished one never gives up."""


@dataclass
class _Job:
    """A save in progress."""

    number: int
    state: RunState
    aside: Path
    own: Future[FileFacts] | None
    """This rank's part, if it writes one."""
    stall_s: float
    bytes: int
    since: float = field(default_factory=time.monotonic)
    commit: Future[Checkpoint] | None = None


class Saver:
    """One per rank. `save`, `poll` and `finish` are called at the same steps on all ranks."""

    def __init__(
        self,
        folder: RunFolder,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        retention: Retention,
        snapshots: Snapshots | None,
        snapshot_every: int | None,
        on_time: bool = False,
        about: dict[str, Any],
        tell: Callable[[str, dict[str, Any]], None],
        waiting: Callable[[], None] = lambda: None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        """
        snapshots:      those of this run on this host, if any
        snapshot_every: steps between snapshots; 0: none; None: as often as costs little
        on_time:        save at the very step that is due, even if training has to wait for the disk
        about:          what the manifest contains besides files: versions, hash of the config
        tell:           (message, event) for the user: rank 0's goes to the console and events.jsonl
        waiting:        called repeatedly while training has to wait for the disk
        reached:        called at each named point of a save, for tests that kill the process there
        """
        self._folder, self._world, self._model, self._optimizer = folder, world, model, optimizer
        self._retention, self._about, self._tell, self._on_time = retention, about, tell, on_time
        self._waiting, self._reached = waiting, reached
        if world.is_rank0:
            with suppress(OSError):  # a failing disk: reported when the first save fails
                folder.checkpoints.mkdir(parents=True, exist_ok=True)
        self._token = str(world.on_rank0(lambda: uuid.uuid4().hex[:12]))
        self._parts: Parts | None = None
        parameters = list(model.parameters())
        spread = any(hasattr(each, "placements") for each in parameters)
        if world.size > 1 or spread:
            from drumline.checkpoint.parts import Parts

            self._parts = Parts(folder, world, self._token, model)
        self._run_id = folder.stored_id()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._memory: InMemory | None = None
        if snapshots or spread or world.device.type != "cpu" or 3 * sum(p.nbytes for p in parameters) > _SMALL_BYTES:
            from drumline.checkpoint.in_memory import InMemory

            self._memory = InMemory(world, snapshots, model, every=snapshot_every, token=self._token, tell=tell)
        self._due: tuple[int, float] | None = None
        """The step that was to be saved while the disk was busy, and when that was."""
        self._job: _Job | None = None
        self._count = self._failures = 0
        self._told_late, self._retry_at = False, 0.0
        self._patience_s, self._waited_s = _PATIENCE_S, 0.0
        """Seconds that training may still wait for saves, and that it has waited since the last one began."""
        self.has_no_folder = False
        """Whether somebody has deleted the run folder, as rank 0 knows: the run should stop."""
        self.saved_step: int | None = None
        """The newest step that rank 0 knows to be on disk, saved by this process."""
        self.then: Callable[[int], None] = lambda step: None
        """Called on rank 0 with each step that is on disk."""

    def wants_to_save(self, step: int, *, due: bool) -> bool:
        """Whether to save after this step: it is due, or was while the disk was busy or failed. Rank 0 decides."""
        if due and self._due is None:
            due_s = time.monotonic()
            if self._job and self._job.bytes < _SMALL_BYTES:
                # It is written in no time: better wait than save another step than the one that is due.
                limit_s = due_s + self._patience_s + _SHARE * (due_s - self._job.since)
                self.wait(limit_s)
                self._waited_s += time.monotonic() - due_s
                self._patience_s = max(0.0, min(self._patience_s, limit_s - time.monotonic()))
            self._due = step, due_s
        retries = self._failures > 0 and time.monotonic() >= self._retry_at
        free = self._world.is_rank0 and (self._job is None or self._on_time)
        return free and (self._due is not None or retries)

    def wants_snapshot(self, step: int) -> bool:
        """Whether to take a snapshot after this step. Rank 0 decides."""
        return self._memory is not None and self._memory.wants_snapshot(step)

    def save(self, state: RunState, *, on_disk: bool = True, in_memory: bool = False) -> None:
        """Start a save, a snapshot or both; the loop may change the weights as soon as this returns."""
        began = time.monotonic()
        if on_disk:
            self.wait()
        tensors, state = tensors_of(self._model, self._optimizer), self._with_scalars(state)
        if self._memory:
            self._memory.take(tensors, state, snapshot=in_memory, began_s=began)
        if on_disk:
            self._start(tensors, state, began - self._waited_s)

    def _start(self, tensors: dict[str, Tensor], state: RunState, began: float) -> None:
        own, self._count = self._own(tensors), self._count + 1
        copied = self._memory.to_host(own) if self._memory else {n: t.clone() for n, t in own.items()}.copy
        state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        name = f".{RunFolder.checkpoint_name(state.step)}.partial-{self._token}-{self._count}"
        aside = self._folder.checkpoints / name
        writes, self._due, self._waited_s = self._parts is None or self._parts.own is not None, None, 0.0
        future = self._thread.submit(self._write_part, copied, aside, state_bytes) if writes else None
        self._job = _Job(self._count, state, aside, future, round(time.monotonic() - began, 4), state_bytes)

    def forget_snapshots(self) -> None:
        """Remove this host's snapshots: the run is saved on disk, or has rolled back."""
        if self._memory:
            self._memory.forget(self._folder)

    def poll(self) -> None:
        """Once per step: check the progress of the save, and report a failure. Never waits."""
        if self._memory:
            self._memory.poll(lambda: tensors_of(self._model, self._optimizer), self._own)
        job = self._job
        if job is None or (job.own is not None and not job.own.done()):
            return
        outcomes = [_outcome(job.own)] if job.own is not None else []
        if self._parts is not None and not self._world.is_rank0:
            for outcome in outcomes:
                self._parts.post(job.number, outcome)
            self._job = None
            return
        others = self._parts.outcomes_of_others(job.number, since=job.since) if self._parts else []
        if others is not None:
            self._conclude(job, [*outcomes, *others])

    def wait(self, limit_s: float = float("inf")) -> None:
        """Wait until nothing is being written, but not beyond a time of the monotonic clock."""
        while self._job is not None and time.monotonic() < limit_s:
            self.poll()
            self._waiting()
            time.sleep(0.002)
        self.poll()

    def finish(self, state: RunState, *, give_up: Callable[[], bool]) -> None:
        """Make sure that the last step is on disk, however long the disk fails."""
        final = self._folder.checkpoint(state.step)
        while True:
            self.wait()
            with waiting_for("the last checkpoint to be written"):
                saved = self._world.on_rank0(lambda: self.saved_step == state.step and final.exists())
                stop = self._world.on_rank0(lambda: self.has_no_folder or (give_up() and self._failures >= _LAST_TRIES))
            if saved:
                return
            if stop:
                from drumline.checkpoint.trouble import end_unsaved

                tensors = tensors_of(self._model, self._optimizer)
                end_unsaved(self._folder, self._world, tensors, self._with_scalars(state))
            time.sleep(max(0.0, self._retry_at - time.monotonic()))
            self.save(state)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._memory:
            self._memory.close()

    def _own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes of a checkpoint."""
        return self._parts.own_tensors(tensors) if self._parts else tensors

    def _with_scalars(self, state: RunState) -> RunState:
        return replace(state, optimizer=optimizer_state(self._model, self._optimizer)[1])

    def _write_part(self, copied: Callable[[], dict[str, Tensor]], aside: Path, state_bytes: int) -> FileFacts:
        tensors = copied()
        if self._run_id != self._folder.stored_id():  # a folder of that name may be on another disk, or another run's
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder.path))
        if self._world.is_rank0:
            aside.parent.mkdir(exist_ok=True)
        if shutil.disk_usage(aside.parent).free < state_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        aside.mkdir(exist_ok=True)
        self._reached("the folder")
        part, parts = (self._parts.own or 0, self._parts.count) if self._parts else (0, 1)
        write = self._memory.write if self._memory else write_tensors
        return write(tensors, aside, part=part, parts=parts, reached=self._reached)

    def _conclude(self, job: _Job, outcomes: list[dict[str, Any]]) -> None:
        done = [_outcome(job.commit)] if job.commit and job.commit.done() else []
        if errors := [outcome["error"] for outcome in (*outcomes, *done) if "error" in outcome]:
            self._failed(job, errors[0])
        elif job.commit is None:
            files = {name: facts for outcome in outcomes for name, facts in outcome["files"].items()}
            job.commit = self._thread.submit(self._commit, job, files)
        elif done:
            self._job, self._failures, self.saved_step = None, 0, job.state.step
            times = self._memory.times if self._memory else {"written_s": round(time.monotonic() - job.since, 4)}
            event = {"event": "saved", "step": job.state.step, "bytes": job.bytes, "stall_s": job.stall_s, **times}
            message = ""
            if self._due is not None and not self._told_late:
                from drumline.checkpoint.trouble import slow_save

                self._told_late = True
                message = slow_save((job.state.step, job.since), self._due, taken_s=time.monotonic() - job.since)
            self._tell(message, event)
            self.then(job.state.step)

    def _commit(self, job: _Job, files: FileFacts) -> Checkpoint:
        # What is large is read back once it is there.
        final, later = self._folder.checkpoint(job.state.step), bool(self._memory)
        done = commit(job.aside, final, job.state, files, about=self._about, later=later, reached=self._reached)
        if self._memory:
            self._memory.check(final, files, since=job.since)
        prune(self._folder, self._retention, newest=done, spare=self._token)
        self._reached("pruned")
        return done

    def _failed(self, job: _Job, why: str) -> None:
        from drumline.checkpoint.trouble import failed_save, is_deleted

        self.has_no_folder = is_deleted(self._folder)
        shutil.rmtree(job.aside, ignore_errors=True)
        self._job = None
        pause_s = min(_RETRY_S[1], _RETRY_S[0] * 2 ** min(self._failures, 10))
        self._failures, self._retry_at = self._failures + 1, time.monotonic() + pause_s
        self._tell(*failed_save(self._folder, step=job.state.step, why=why, needed_bytes=job.bytes, pause_s=pause_s))


def _outcome(work: Future[Any]) -> dict[str, Any]:
    if (error := work.exception()) is None:
        return {"files": work.result()}
    from drumline.checkpoint.trouble import explain

    return {"error": explain(error)}
