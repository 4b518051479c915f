"""Snapshots: checkpoints in memory between those on disk, so that a dead process costs a few steps and no disk time.

They lie in /dev/shm, which outlives a process but not the host, in the form of checkpoints: complete, hashed, verified.
One process of each host writes the whole state, so that any host that is left has it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor

from drumline.checkpoint.checkpoints import Checkpoint, RunState, commit, newest_valid
from drumline.checkpoint.storage import write_tensors
from drumline.files import CHECKPOINT_PREFIX, Lock, RunFolder
from drumline.units import count

MEMORY = Path("/dev/shm")
_FORGOTTEN_S = 7 * 86400.0
_OWNER = "run"
"""The file that holds the path of the run's folder."""


class Snapshots:
    """The snapshots of one run on this host."""

    def __init__(self, folder: Path, run: RunFolder) -> None:
        self.folder, self._run = folder, run
        self._lock: Lock | None = None

    @classmethod
    def of(cls, run: RunFolder, run_id: str | None = None) -> Snapshots:
        """run_id: of this very run (rank 0 knows it), so that a new run in the same folder never meets an old one's"""
        return cls(MEMORY / f"drumline-{os.getuid()}" / (run_id or run.run_id()), run)

    def no_room(self, state_bytes: int) -> str | None:
        """Why snapshots of this size cannot be kept here; None if they can."""
        needed = 2 * state_bytes  # a new one is complete before the old one goes
        try:
            free = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) + _bytes_in(self.folder)
        except OSError as error:
            return f"there is no {MEMORY} ({error.strerror})"
        if free < needed:
            return f"they need {count(needed)}B of memory in {MEMORY}, and {count(free)}B are free"
        return None

    def save(self, tensors: dict[str, Tensor], state: RunState) -> None:
        """Keep this state, and then forget the one before; nothing where another process does so already."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_ours():
            return
        for leftover in self.folder.glob(".step-*"):  # of a process that was killed
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
            lock = Lock(self.folder / ".lock")
            if not lock.take():
                lock.close()
                return False
            self._lock = lock
            (self.folder / _OWNER).write_text(str(self._run.path.absolute()), encoding="utf-8")
        return True

    def newest(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """What there is to go on from; a damaged one is passed over."""
        return newest_valid(self.folder, warn=warn)

    def forget_others(self) -> None:
        """Give back the memory of runs that were killed and then deleted, or not started again for a week."""
        for folder in self.folder.parent.glob("*"):
            owner = folder / _OWNER
            if folder == self.folder or not owner.exists():
                continue
            old = time.time() - folder.stat().st_mtime > _FORGOTTEN_S
            if old or not Path(owner.read_text(encoding="utf-8")).exists():
                lock = Lock(folder / ".lock")
                if lock.take():
                    shutil.rmtree(folder, ignore_errors=True)
                lock.close()

    def clear(self) -> None:
        """Give the memory back: the run is saved elsewhere, or goes another way."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # other runs have theirs there
            self.folder.parent.rmdir()


def _bytes_in(folder: Path) -> int:
    """What its files hold; another launcher of the run on this machine may be replacing them meanwhile."""
    held = 0
    for parent, _, names in os.walk(folder):  # passes over folders that are gone
        for name in names:
            with suppress(FileNotFoundError):
                held += os.stat(os.path.join(parent, name)).st_size
    return held
