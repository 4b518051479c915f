"""Saving while training goes on: copy the state, let a thread write it, never lose the checkpoint before.

The loop stands still only while the state is copied to memory of its own (one copy of what this rank writes; pinned for
a GPU). Each rank that sees the run folder writes a part of the tensors; ranks tell rank 0 through the store when theirs
is on the disk, and rank 0 makes the checkpoint with one rename. A save that fails is reported at the next step, the run
goes on, and it is tried again.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.checkpoint.checkpoints import (
    Checkpoint,
    RunState,
    checkpoint_paths,
    commit,
    divide,
    optimizer_state,
    tensors_of,
)
from drumline.checkpoint.retention import Retention, prune
from drumline.checkpoint.snapshots import MEMORY, Snapshots
from drumline.checkpoint.staging import Staging
from drumline.checkpoint.storage import FileFacts, write_tensors
from drumline.errors import CheckpointError, DrumlineError
from drumline.files import RunFolder
from drumline.parallel import World, waiting_for
from drumline.units import count

_RETRY_S = (2.0, 60.0)
"""The first pause before a failed save is tried again, and the longest; each is twice the one before."""
_LAST_TRIES = 3
"""How often a run that was asked to stop tries to save before it gives up; one that has finished tries for ever."""
_PEERS_S = 1800.0
"""How long rank 0 waits for another rank's part before it gives a save up."""


@dataclass
class _Job:
    """A save under way."""

    number: int
    state: RunState
    aside: Path
    own: Future[FileFacts] | None
    stall_s: float
    bytes: int
    since: float = field(default_factory=time.monotonic)
    commit: Future[Checkpoint] | None = None


class Saver:
    """One per rank. `save`, `snapshot`, `poll` and `finish` are called at the same steps on every rank."""

    def __init__(
        self,
        folder: RunFolder,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        retention: Retention,
        snapshots: Snapshots,
        takes_snapshots: bool,
        about: dict[str, Any],
        tell: Callable[[str, dict[str, Any]], None],
        waiting: Callable[[], None] = lambda: None,
        reached: Callable[[str], None] = lambda point: None,
    ) -> None:
        """
        about:   what the manifest says beside the files: versions, the config's hash
        tell:    (message, event) for the user: rank 0's goes to the console and events.jsonl
        waiting: called again and again while training has to wait for the disk
        reached: told each named point of a save, for tests that kill the process there
        """
        self._folder, self._world, self._model, self._optimizer = folder, world, model, optimizer
        self._retention, self._about, self._tell = retention, about, tell
        self._waiting, self._reached = waiting, reached
        self._snapshots, self._takes_snapshots = snapshots, takes_snapshots and world.place.local_rank == 0
        self._token = str(world.on_main(lambda: uuid.uuid4().hex[:12]))
        self._writers = self._who_sees_the_folder()
        self._identified = folder.identity.exists()
        self._staging = Staging(world.device)
        self._prepared: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._job: _Job | None = None
        self._snapshot: Future[None] | None = None
        self._snapshots_off = ""
        self._count = self._failures = 0
        self._retry_at = 0.0
        self.saved_step: int | None = None
        """The newest step that rank 0 knows to be on the disk, saved by this process."""

    def wants_to_retry(self) -> bool:
        """Whether a save that failed should be tried again now; rank 0 asks the others to."""
        return self._failures > 0 and self._job is None and time.monotonic() >= self._retry_at

    def save(self, state: RunState) -> None:
        """Begin to save; the loop may change the weights as soon as this returns."""
        began = time.monotonic()
        self.wait()
        if self._prepared is not None:
            self._prepared.exception()  # wait for it
        tensors = tensors_of(self._model, self._optimizer)
        own = self._staging.copy({name: tensors[name] for name in self._part(tensors)})
        state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._count += 1
        name = f".{RunFolder.checkpoint_name(state.step)}.partial-{self._token}-{self._count}"
        aside = self._folder.checkpoints / name
        state = self._with_scalars(state)
        future = None
        if self._world.rank in self._writers:
            part = self._writers.index(self._world.rank)
            future = self._thread.submit(self._write_part, own, aside, part, state_bytes)
        self._job = _Job(self._count, state, aside, future, time.monotonic() - began, state_bytes)

    def snapshot(self, state: RunState) -> None:
        """Begin to keep a copy in memory, unless the last save is still being written: then that one will do."""
        if not self._takes_snapshots or self._busy() or not (self._prepared and self._prepared.done()):
            return
        tensors = tensors_of(self._model, self._optimizer)
        if why := self._snapshots.no_room(sum(t.nbytes for t in tensors.values())):
            self._no_snapshot(why)
            return
        self._snapshot = self._thread.submit(
            self._snapshots.save, self._staging.copy(tensors), self._with_scalars(state)
        )

    def _no_snapshot(self, why: str) -> None:
        """Snapshots are off for as long as there is no room for them; said once."""
        if not self._snapshots_off:
            self._tell(f"warning: snapshots are off: {why}", {"event": "snapshots off", "why": why})
        self._snapshots_off = why

    def forget_snapshots(self) -> None:
        """Those of this host: the run is saved on disk, or has gone back to an earlier step."""
        if self._snapshot is not None:
            self._snapshot.exception()  # wait for it
        if self._world.place.local_rank == 0:
            self._snapshots.clear()

    def poll(self) -> None:
        """Once a step: see how far the save is, and say so if it failed. Never waits."""
        if self._prepared is None:
            self._prepared = self._thread.submit(self._staging.prepare, self._to_stage())
        if self._snapshot is not None and self._snapshot.done():
            error, self._snapshot = self._snapshot.exception(), None
            if error is not None:
                self._no_snapshot(_explain(error))
            else:
                self._snapshots_off = ""
        job = self._job
        if job is None or (job.own is not None and not job.own.done()):
            return
        if not self._world.is_main:
            if job.own is not None:
                self._world.post(self._key(job, self._world.rank), _outcome(job.own))
            self._job = None
            return
        parts = self._world.posted([self._key(job, rank) for rank in self._writers[1:]])
        if parts is None:
            if time.monotonic() - job.since > _PEERS_S:
                self._failed(job, f"the other ranks' parts are not there after {_PEERS_S:.0f} s")
            return
        assert job.own is not None
        self._conclude(job, [_outcome(job.own), *parts])

    def wait(self) -> None:
        """Until nothing is being written."""
        while self._busy():
            self.poll()
            self._waiting()
            time.sleep(0.002)
        self.poll()

    def finish(self, state: RunState, *, give_up: Callable[[], bool]) -> None:
        """See to it that the last step is on the disk, however long the disk is in trouble."""
        while True:
            self.wait()
            with waiting_for("the writing of the last checkpoint"):
                saved, stop = self._world.on_main(
                    lambda: [self.saved_step == state.step, give_up() and self._failures >= _LAST_TRIES]
                )
            if saved:
                return
            if stop:
                in_memory = self._world.on_main(lambda: self._keep_in_memory(state))
                kept = f"its state is kept in {MEMORY} until this host restarts" if in_memory else "it is lost"
                raise CheckpointError(
                    f"step {state.step} could not be saved to {self._folder.checkpoints} before the run had to stop: "
                    f"{kept}; the newest checkpoint is of step {self._newest_step()}",
                    fix="make room there and start the same command again",
                    told=not self._world.is_main,
                )
            time.sleep(max(0.0, self._retry_at - time.monotonic()))
            self.save(state)

    def _keep_in_memory(self, state: RunState) -> bool:
        """The last resort of a run that must end while its disk takes nothing."""
        tensors = tensors_of(self._model, self._optimizer)
        if self._snapshots.no_room(sum(tensor.nbytes for tensor in tensors.values())) is not None:
            return False
        try:
            self._snapshots.save(self._staging.copy(tensors), self._with_scalars(state))
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _busy(self) -> bool:
        return self._job is not None or (self._snapshot is not None and not self._snapshot.done())

    def _who_sees_the_folder(self) -> list[int]:
        """Ranks whose host has the run folder on a shared disk, rank 0 always among them."""
        mark = self._folder.checkpoints / f".seen-{self._token}"
        self._world.on_main(lambda: _touch(mark))
        seen = self._world.gather(mark.exists() or self._world.is_main)
        self._world.on_main(lambda: mark.unlink(missing_ok=True))
        return [rank for rank, sees in enumerate(seen) if sees]

    def _to_stage(self) -> dict[str, Tensor]:
        """What this rank writes at all: its part of a checkpoint, or everything where it keeps snapshots."""
        tensors = tensors_of(self._model, self._optimizer)
        if self._takes_snapshots:
            return tensors
        return {name: tensors[name] for name in self._part(tensors)}

    def _part(self, tensors: dict[str, Tensor]) -> list[str]:
        if self._world.rank not in self._writers:
            return []
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        return divide(sizes, len(self._writers))[self._writers.index(self._world.rank)]

    def _with_scalars(self, state: RunState) -> RunState:
        return RunState(**{**state.__dict__, "optimizer": optimizer_state(self._model, self._optimizer)[1]})

    def _write_part(self, own: dict[str, Tensor], aside: Path, part: int, state_bytes: int) -> FileFacts:
        if self._identified and not self._folder.identity.exists():  # a folder of that name may be another disk's
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._folder.path))
        if part == 0 and not aside.parent.exists():
            aside.parent.mkdir()
        free = shutil.disk_usage(aside.parent).free
        if free < state_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        aside.mkdir(exist_ok=True)
        self._reached("the folder")
        return write_tensors(own, aside, part=part, parts=len(self._writers), reached=self._reached)

    def _conclude(self, job: _Job, parts: list[dict[str, Any]]) -> None:
        errors = [part["error"] for part in parts if "error" in part]
        if errors:
            self._failed(job, errors[0])
        elif job.commit is None:
            files = {name: facts for part in parts for name, facts in part["files"].items()}
            job.commit = self._thread.submit(self._commit, job, files)
        elif job.commit.done():
            error = job.commit.exception()
            if error is not None:
                self._failed(job, _explain(error))
                return
            self._job, self._failures, self.saved_step = None, 0, job.state.step
            took_s = time.monotonic() - job.since
            self._tell(
                "",
                {
                    "event": "saved",
                    "step": job.state.step,
                    "bytes": job.bytes,
                    "stall_s": round(job.stall_s, 4),
                    "written_s": round(took_s, 4),
                },
            )

    def _commit(self, job: _Job, files: FileFacts) -> Checkpoint:
        final = self._folder.checkpoint(job.state.step)
        done = commit(job.aside, final, job.state, files, about=self._about, reached=self._reached)
        prune(self._folder, self._retention, newest=done, spare=self._token)
        self._reached("pruned")
        return done

    def _failed(self, job: _Job, why: str) -> None:
        shutil.rmtree(job.aside, ignore_errors=True)
        self._job = None
        pause_s = min(_RETRY_S[1], _RETRY_S[0] * 2 ** min(self._failures, 10))
        self._failures, self._retry_at = self._failures + 1, time.monotonic() + pause_s
        free = _free_bytes(self._folder.checkpoints)
        self._tell(
            f"WARNING: the checkpoint of step {job.state.step:,} could not be saved to {self._folder.checkpoints}: "
            f"{why} ({count(job.bytes)}B needed, {free} free). The one of step {self._newest_step()} is kept, training "
            f"goes on, and it is tried again in {pause_s:.0f} s",
            {"event": "save failed", "step": job.state.step, "why": why, "bytes": job.bytes},
        )

    def _newest_step(self) -> str:
        paths = checkpoint_paths(self._folder.checkpoints)
        return f"{int(paths[-1].name.rsplit('-', 1)[1]):,}" if paths else "none"

    def _key(self, job: _Job, rank: int) -> str:
        return f"saved/{self._token}/{job.number}/{rank}"


def _outcome(part: Future[FileFacts]) -> dict[str, Any]:
    error = part.exception()
    return {"files": part.result()} if error is None else {"error": _explain(error)}


def _explain(error: BaseException) -> str:
    if isinstance(error, DrumlineError):
        return error.problem
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def _free_bytes(path: Path) -> str:
    try:
        return f"{count(shutil.disk_usage(path).free)}B"
    except OSError:
        return "none"


def _touch(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        pass  # a disk in trouble: rank 0 will say so when it saves
