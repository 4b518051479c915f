"""Saving in the background: copy the state, let a thread write it, never lose the previous checkpoint.

The loop pauses only while the state is copied to a buffer (only what this rank writes; pinned for a GPU). Of several
ranks each writes a part (parts.py), and rank 0 completes the checkpoint with one rename. A failed save is reported at
the next step, the run continues, and it is retried (trouble.py).
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
from drumline.checkpoint.state import Staging, optimizer_state, tensors_of
from drumline.checkpoint.storage import FileFacts, write_tensors
from drumline.files import RunFolder
from drumline.parallel import World, waiting_for

if TYPE_CHECKING:
    from drumline.checkpoint.parts import Parts
    from drumline.checkpoint.snapshots import Snapshots, SnapshotTaker

_RETRY_S = (2.0, 60.0)
"""The first pause before a failed save is retried, and the longest; each is twice the previous one."""
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
    """One per rank. `save`, `snapshot`, `poll` and `finish` are called at the same steps on all ranks."""

    def __init__(
        self,
        folder: RunFolder,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        retention: Retention,
        snapshots: Snapshots | None,
        takes_snapshots: bool,
        about: dict[str, Any],
        tell: Callable[[str, dict[str, Any]], None],
        waiting: Callable[[], None] = lambda: None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        """
        snapshots: those of this run on this host, if any
        about:     what the manifest contains besides files: versions, hash of the config
        tell:      (message, event) for the user: rank 0's goes to the console and events.jsonl
        waiting:   called repeatedly while training has to wait for the disk
        reached:   called at each named point of a save, for tests that kill the process there
        """
        self._folder, self._world, self._model, self._optimizer = folder, world, model, optimizer
        self._retention, self._about, self._tell = retention, about, tell
        self._waiting, self._reached = waiting, reached
        if world.is_rank0:
            with suppress(OSError):  # a failing disk: reported when the first save fails
                folder.checkpoints.mkdir(parents=True, exist_ok=True)
        self._token = str(world.on_rank0(lambda: uuid.uuid4().hex[:12]))
        self._parts: Parts | None = None
        if world.size > 1:
            from drumline.checkpoint.parts import Parts

            self._parts = Parts(folder, world, self._token)
        self._run_id = folder.stored_id()
        self._staging = Staging(world.device)
        self._prepared: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._snapshots = snapshots if world.place.local_rank == 0 else None
        self._taker: SnapshotTaker | None = None
        if self._snapshots and takes_snapshots:
            from drumline.checkpoint.snapshots import SnapshotTaker

            self._taker = SnapshotTaker(self._snapshots, self._thread, tell)
        self._job: _Job | None = None
        self._count = self._failures = 0
        self._retry_at = 0.0
        self.has_no_folder = False
        """Whether somebody has deleted the run folder, as rank 0 knows: the run should stop."""
        self.saved_step: int | None = None
        """The newest step that rank 0 knows to be on disk, saved by this process."""

    def wants_to_retry(self) -> bool:
        """Whether a failed save should be retried now; rank 0 asks the others to."""
        return self._failures > 0 and self._job is None and time.monotonic() >= self._retry_at

    def save(self, state: RunState) -> None:
        """Start saving; the loop may change the weights as soon as this returns."""
        began = time.monotonic()
        self.wait()
        if self._prepared is not None:
            self._prepared.exception()  # wait for it
        tensors = tensors_of(self._model, self._optimizer)
        own = self._staging.copy(self._own(tensors))
        state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._count += 1
        name = f".{RunFolder.checkpoint_name(state.step)}.partial-{self._token}-{self._count}"
        aside = self._folder.checkpoints / name
        future = None
        if self._parts is None or self._parts.own is not None:
            future = self._thread.submit(self._write_part, own, aside, state_bytes)
        stall_s = time.monotonic() - began
        self._job = _Job(self._count, self._with_scalars(state), aside, future, stall_s, state_bytes)

    def snapshot(self, state: RunState) -> None:
        """Start a snapshot, unless the last save is still being written: that one is enough."""
        if self._taker and not self._busy() and self._prepared and self._prepared.done():
            tensors = tensors_of(self._model, self._optimizer)
            self._taker.take(tensors, self._staging, self._with_scalars(state))

    def forget_snapshots(self) -> None:
        """Remove this host's snapshots: the run is saved on disk, or has rolled back."""
        if self._taker:
            self._taker.wait()
        if self._snapshots:
            self._snapshots.clear()

    def poll(self) -> None:
        """Once per step: check the progress of the save, and report a failure. Never waits."""
        if self._prepared is None:
            tensors = tensors_of(self._model, self._optimizer)
            staged = tensors if self._taker else self._own(tensors)
            self._prepared = self._thread.submit(self._staging.prepare, staged)
        if self._taker:
            self._taker.poll()
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

    def wait(self) -> None:
        """Wait until nothing is being written."""
        while self._busy():
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

    def _busy(self) -> bool:
        return self._job is not None or (self._taker is not None and self._taker.busy())

    def _own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes of a checkpoint."""
        return self._parts.own_tensors(tensors) if self._parts else tensors

    def _with_scalars(self, state: RunState) -> RunState:
        return replace(state, optimizer=optimizer_state(self._model, self._optimizer)[1])

    def _write_part(self, own: dict[str, Tensor], aside: Path, state_bytes: int) -> FileFacts:
        if self._run_id != self._folder.stored_id():  # a folder of that name may be on another disk, or another run's
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder.path))
        if self._world.is_rank0:
            aside.parent.mkdir(exist_ok=True)
        if shutil.disk_usage(aside.parent).free < state_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        aside.mkdir(exist_ok=True)
        self._reached("the folder")
        part, parts = (self._parts.own or 0, self._parts.count) if self._parts else (0, 1)
        return write_tensors(own, aside, part=part, parts=parts, reached=self._reached)

    def _conclude(self, job: _Job, outcomes: list[dict[str, Any]]) -> None:
        errors = [outcome["error"] for outcome in outcomes if "error" in outcome]
        if errors:
            self._failed(job, errors[0])
        elif job.commit is None:
            files = {name: facts for outcome in outcomes for name, facts in outcome["files"].items()}
            job.commit = self._thread.submit(self._commit, job, files)
        elif job.commit.done():
            if (error := job.commit.exception()) is not None:
                self._failed(job, _explain(error))
                return
            self._job, self._failures, self.saved_step = None, 0, job.state.step
            times = {"stall_s": round(job.stall_s, 4), "written_s": round(time.monotonic() - job.since, 4)}
            self._tell("", {"event": "saved", "step": job.state.step, "bytes": job.bytes, **times})

    def _commit(self, job: _Job, files: FileFacts) -> Checkpoint:
        final = self._folder.checkpoint(job.state.step)
        done = commit(job.aside, final, job.state, files, about=self._about, reached=self._reached)
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


def _outcome(part: Future[FileFacts]) -> dict[str, Any]:
    error = part.exception()
    return {"files": part.result()} if error is None else {"error": _explain(error)}


def _explain(error: BaseException) -> str:
    from drumline.checkpoint.trouble import explain

    return explain(error)
