"""The snapshots of a run on this host: two slots per part, of which at least one set is always complete.

    /dev/shm/drumline-UID/RUN-ID/
      0-of-2-a, 0-of-2-b      the slots of the first of two ranks on this host
      1-of-2-a, 1-of-2-b      those of the second one
      0-of-1-c                all of a run that could not be saved when it had to stop
      run                     the path of the run folder
      said-late               a warning that the user has read: ranks that start again do not repeat it

Each rank of a host writes its share of the state, so that the host has all of it. A snapshot is complete when all parts
have a slot of the same step; only then is the older one written over.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from drumline.files import RunFolder, make_private, publish, room_in_container
from drumline.snapshots.layout import Layout
from drumline.snapshots.memory import threads_for_copies
from drumline.snapshots.slots import Content, DamagedError, Header, Slot, empty_slot, is_in_use, read_header, read_slot
from drumline.units import count

_FORGOTTEN_S = 7 * 86400.0
_OWNER = "run"
_ATTEMPTS = 10
UNREADABLE = (DamagedError, OSError, ValueError, TypeError, KeyError, AttributeError)
"""What reading a damaged slot may raise."""
_SLOT = re.compile(r"(\d+)-of-(\d+)-[abc]")


@dataclass(frozen=True)
class Found:
    """A complete snapshot; not verified."""

    step: int
    token: str
    slots: tuple[Path, ...]
    """One per part."""

    @property
    def saved(self) -> float:
        """When it was complete, in seconds since 1970."""
        return max(path.stat().st_mtime for path in self.slots)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.slots)


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot."""

    found: Found
    about: dict[str, Any]
    tensors: dict[str, Tensor]
    parts: list[Content]
    headers: list[Header | None]

    def is_still_there(self) -> bool:
        """Whether nobody has written to it since it was verified."""
        return [_header(path) for path in self.found.slots] == self.headers


class Snapshots:
    """The snapshots of one run on this host."""

    def __init__(self, folder: Path, run: Path, *, copies: int = 1) -> None:
        """copies: hosts that have each shard of a state that is spread over them"""
        self.folder, self._run, self.copies = folder, run, copies

    def make_folder(self) -> None:
        for attempt in range(_ATTEMPTS):
            try:
                if not make_private(self.folder.parent):
                    raise PermissionError(f"{self.folder.parent} is not this user's own folder")
                self.folder.mkdir(mode=0o700, exist_ok=True)
                break
            except FileNotFoundError:  # another run, at its end, has removed the folder of all runs
                if attempt + 1 == _ATTEMPTS:
                    raise
        (self.folder / _OWNER).write_text(str(self._run.absolute()), encoding="utf-8")

    def is_said_first(self, what: str) -> bool:
        """Whether no process of this run has said that here before."""
        try:
            (self.folder / f"said-{what}").open("x").close()
        except FileExistsError:
            return False
        except OSError:  # no room: rather twice than never
            return True
        return True

    def slots_of(self, part: int, parts: int) -> list[Path]:
        return [self.folder / f"{part}-of-{parts}-{letter}" for letter in "ab"]

    def no_room(self, state_bytes: int) -> str | None:
        """Why snapshots of this size cannot be kept here; None if they can."""
        memory = self.folder.parents[1]
        needed = slots_bytes(state_bytes)
        try:
            free = free_in(memory) + _bytes_in(self.folder)
        except OSError as error:
            return f"{memory} does not exist ({error.strerror})"
        if free < needed:
            return f"they need {count(needed)}B of memory in {memory}, but {count(free)}B are free"
        return None

    def complete(self, *, damaged: Callable[[Path, Exception], None] = lambda path, error: None) -> list[Found]:
        """Complete snapshots, the newest first; not verified."""
        sets: dict[tuple[int, int, str], dict[int, Path]] = {}
        for path in _slots(self.folder):
            match = _SLOT.fullmatch(path.name)
            try:
                header = read_header(path)
            except DamagedError as error:
                damaged(path, error)
                continue
            if match and header:
                sets.setdefault((header.step, int(match[2]), header.token), {})[int(match[1])] = path
        return [
            Found(step, token, tuple(found[part] for part in range(parts)))
            for (step, parts, token), found in sorted(sets.items(), reverse=True)
            if len(found) == parts
        ]

    def newest(self, *, warn: Callable[[str], None], device: torch.device) -> Snapshot | None:
        """The newest complete snapshot, verified; a damaged one is skipped."""
        with ThreadPoolExecutor(threads_for_copies(), thread_name_prefix="verify") as threads:
            for found in self.complete(damaged=lambda path, error: warn(set_aside(path, error))):
                headers, parts = [_header(path) for path in found.slots], []
                for path in found.slots:
                    try:
                        parts.append(read_slot(path, threads, device=device))
                    except UNREADABLE as error:
                        warn(set_aside(path, error))
                        break
                else:
                    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
                    return Snapshot(found, parts[0].about, tensors, parts, headers)
        return None

    def store(
        self,
        tensors: dict[str, Tensor],
        step: int,
        about: dict[str, Any],
        *,
        token: str,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """Keep a state beside what there is: the last resort of a run that cannot be saved. OSError: no room.

        place: which part of how many on this host
        """
        if why := self.no_room(place[1] * sum(tensor.nbytes for tensor in tensors.values())):
            raise OSError(why)
        self.make_folder()
        slot = Slot(self.folder / f"{place[0]}-of-{place[1]}-c", Layout.of(tensors), device=torch.device("cpu"))
        slot.open()
        for name, view in slot.layout.views(slot.data).items():
            view.copy_(tensors[name])
        with ThreadPoolExecutor(1) as thread:
            slot.seal(step, token, about, thread)
        slot.close()

    def forget_others(self) -> None:
        """Free the memory of runs that were killed and then deleted or replaced, or not resumed for a week."""
        for folder in self.folder.parent.glob("*"):
            owner = folder / _OWNER
            if folder == self.folder or not owner.exists():
                continue
            old = time.time() - owner.stat().st_mtime > _FORGOTTEN_S
            run = Path(owner.read_text(encoding="utf-8"))
            gone = old or not run.exists() or RunFolder(run).stored_id() not in ("", folder.name)
            if gone and not any(is_in_use(path) for path in _slots(folder)):
                shutil.rmtree(folder, ignore_errors=True)

    def forget_parts(self, parts: int) -> None:
        """Remove the slots that another number of ranks on this host has left."""
        for path in _slots(self.folder):
            if f"-of-{parts}-" not in path.name and not is_in_use(path):
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Free the memory: the run is saved on disk, or takes another course."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # not empty: other runs have snapshots there
            self.folder.parent.rmdir()


def slots_bytes(state_bytes: int) -> int:
    """Of all slots on a host: a new snapshot is complete before the old one is written over."""
    return 2 * state_bytes


def free_in(memory: Path) -> int:
    """Bytes that a file system in memory has room for, within a container's limit; OSError if there is none."""
    return int(min(shutil.disk_usage(memory).free, psutil.virtual_memory().available, room_in_container()))


def _slots(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("*-of-*-[abc]")) if _SLOT.fullmatch(path.name))


def _header(path: Path) -> Header | None:
    try:
        return read_header(path)
    except DamagedError:
        return None


def set_aside(path: Path, error: Exception) -> str:
    """Empties a damaged slot, so that the next snapshot is written there and not over one that is whole."""
    empty_slot(path)
    publish({"event": "checkpoint damaged", "path": str(path)})
    return f"the snapshot {path} is damaged: {error}; trying an older one"


def _bytes_in(folder: Path) -> int:
    """Size of its files; another process may remove them."""
    total = 0
    for path in folder.glob("*"):
        with suppress(OSError):
            total += os.stat(path).st_size
    return total
