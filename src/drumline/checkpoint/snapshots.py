"""Snapshots: checkpoints in memory between those on disk, so that a dead process costs a few steps and no disk I/O.

They are in /dev/shm, which outlives a process but not the host, in the format of checkpoints: atomic, hashed, verified.
One process of each host writes the whole state, so that any remaining host has it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from drumline.checkpoint.checkpoints import Checkpoint, RunState, commit
from drumline.checkpoint.newest import newest_valid
from drumline.checkpoint.resuming import snapshot_folder
from drumline.checkpoint.state import Staging
from drumline.checkpoint.storage import write_tensors
from drumline.files import CHECKPOINT_PREFIX, Lock, RunFolder, make_private
from drumline.units import count

_FORGOTTEN_S = 7 * 86400.0
_LOCK, _OWNER = ".lock", "run"
"""The file with the path of the run folder."""


def open_snapshots(run: RunFolder, run_id: str, *, forgets: bool) -> Snapshots | None:
    """The snapshots of a run on this host; None if their folder is not of this user. forgets: deletes old ones"""
    if not make_private(snapshot_folder(run_id).parent):
        return None
    snapshots = Snapshots.of(run, run_id)
    if forgets:
        snapshots.forget_others()
    return snapshots


class Snapshots:
    """The snapshots of one run on this host."""

    def __init__(self, folder: Path, run: RunFolder) -> None:
        self.folder, self._run = folder, run
        self._lock: Lock | None = None

    @classmethod
    def of(cls, run: RunFolder, run_id: str | None = None) -> Snapshots:
        """run_id: of this run (rank 0 knows it), so that a new run in the same folder never uses old snapshots"""
        return cls(snapshot_folder(run_id or run.run_id()), run)

    def no_room(self, state_bytes: int) -> str | None:
        """Why snapshots of this size cannot be kept here; None if they can."""
        memory = self.folder.parents[1]
        needed = 2 * state_bytes  # a new one is complete before the old one is deleted
        try:
            free = min(shutil.disk_usage(memory).free, psutil.virtual_memory().available) + _bytes_in(self.folder)
        except OSError as error:
            return f"{memory} does not exist ({error.strerror})"
        if free < needed:
            return f"they need {count(needed)}B of memory in {memory}, but {count(free)}B are free"
        return None

    def save(self, tensors: dict[str, Tensor], state: RunState) -> None:
        """Store this state, then delete the previous one; no effect if another process already does."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_ours():
            return
        for leftover in self.folder.glob(".step-*"):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)
        aside = self.folder / f".{RunFolder.checkpoint_name(state.step)}.{os.getpid()}"
        aside.mkdir()
        files = write_tensors(tensors, aside, part=0, parts=1, reached=lambda point: None)
        kept = commit(aside, self.folder / RunFolder.checkpoint_name(state.step), state, files, about={})
        for path in self.folder.glob(f"{CHECKPOINT_PREFIX}*"):
            if path != kept.path:
                shutil.rmtree(path, ignore_errors=True)

    def _is_ours(self) -> bool:
        """Two launchers of one run may share a machine, as in a drill: one of them is enough."""
        if self._lock is None:
            lock = Lock(self.folder / _LOCK)
            if not lock.take():
                lock.close()
                return False
            self._lock = lock
            (self.folder / _OWNER).write_text(str(self._run.path.absolute()), encoding="utf-8")
        return True

    def newest(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """What there is to resume from; a damaged one is skipped."""
        return newest_valid(self.folder, warn=warn)

    def forget_others(self) -> None:
        """Free the memory of runs that were killed and then deleted, or not resumed for a week."""
        for folder in self.folder.parent.glob("*"):
            owner = folder / _OWNER
            if folder == self.folder or not owner.exists():
                continue
            old = time.time() - folder.stat().st_mtime > _FORGOTTEN_S
            if old or not Path(owner.read_text(encoding="utf-8")).exists():
                lock = Lock(folder / _LOCK)
                if lock.take():
                    shutil.rmtree(folder, ignore_errors=True)
                lock.close()

    def clear(self) -> None:
        """Free the memory: the run is saved on disk, or takes another course."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # not empty: other runs have snapshots there
            self.folder.parent.rmdir()


class SnapshotTaker:
    """Takes snapshots in the background, in the saver's thread."""

    def __init__(
        self, snapshots: Snapshots, thread: ThreadPoolExecutor, tell: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._snapshots, self._thread, self._tell = snapshots, thread, tell
        self._under_way: Future[None] | None = None
        self._off = False

    def take(self, tensors: dict[str, Tensor], staging: Staging, state: RunState) -> None:
        if why := self._snapshots.no_room(sum(tensor.nbytes for tensor in tensors.values())):
            self._switch_off(why)
        else:
            self._under_way = self._thread.submit(self._snapshots.save, staging.copy(tensors), state)

    def busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> None:
        if self._under_way is not None:
            self._under_way.exception()

    def poll(self) -> None:
        if self._under_way is None or not self._under_way.done():
            return
        error, self._under_way = self._under_way.exception(), None
        if error is None:
            self._off = False
        else:
            from drumline.checkpoint.trouble import explain

            self._switch_off(explain(error))

    def _switch_off(self, why: str) -> None:
        """Snapshots are disabled while there is no space for them; reported once."""
        if not self._off:
            self._tell(f"warning: snapshots are disabled: {why}", {"event": "snapshots off", "why": why})
        self._off = True


def _bytes_in(folder: Path) -> int:
    """Size of its files; another launcher of the run on this machine may be replacing them."""
    total = 0
    for parent, _, names in os.walk(folder):  # ignores folders that disappear
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total
