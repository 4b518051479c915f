"""Snapshots: checkpoints in memory between those on disk, so that a dead process costs a few steps and no disk time.

They lie in /dev/shm, which outlives a process but not the host, in the form of checkpoints: complete, hashed, verified.
One process of each host writes the whole state, so that any host that is left has it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from torch import Tensor

from drumline.checkpoints import Checkpoint, RunState, commit, newest_valid
from drumline.records import count
from drumline.run_folder import RunFolder
from drumline.storage import write_tensors

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Snapshots:
    """The snapshots of one run on this host."""

    folder: Path

    @classmethod
    def of(cls, run_id: str) -> Snapshots:
        """run_id: of this very run, so that a new run of the same name never meets an old one's memory"""
        return cls(MEMORY / f"drumline-{os.getuid()}" / run_id)

    def no_room(self, state_bytes: int) -> str | None:
        """Why snapshots of this size cannot be kept here; None if they can."""
        needed = 2 * state_bytes  # a new one is complete before the old one goes
        held = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        try:
            free = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) + held
        except OSError as error:
            return f"there is no {MEMORY} ({error.strerror})"
        if free < needed:
            return f"they need {count(needed)}B of memory in {MEMORY}, and {count(free)}B are free"
        return None

    def save(self, tensors: dict[str, Tensor], state: RunState) -> None:
        """Keep this state, and then forget the one before."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in self.folder.glob(".*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        aside = self.folder / f".{RunFolder.checkpoint_name(state.step)}.{os.getpid()}"
        aside.mkdir()
        files = write_tensors(tensors, aside, part=0, parts=1, reached=lambda point: None)
        kept = commit(aside, self.folder / RunFolder.checkpoint_name(state.step), state, files, about={})
        for path in self.folder.iterdir():
            if path != kept.path:
                shutil.rmtree(path, ignore_errors=True)

    def newest(self, *, warn: Callable[[str], None]) -> Checkpoint | None:
        """What there is to go on from; a damaged one is passed over."""
        return newest_valid(self.folder, warn=warn)

    def clear(self) -> None:
        """Give the memory back: the run is saved elsewhere, or goes another way."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # other runs have theirs there
            self.folder.parent.rmdir()
