"""One checkpoint in many pieces: each rank that sees the run folder writes a part, several files at the same time.

Files are hashed while they are written, since one thread hashes slower than disks write, and read back one by one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from drumline.checkpoint.storage import FileFacts, contents_of, sha256_of, write_file
from drumline.files import RunFolder
from drumline.parallel import World

_THREADS = 8
"""Files that are written at the same time, and as many that are hashed."""
_FILE_BYTES, _FILES = 128 << 20, 32
"""About as much is in one file of each kind, unless that would be more files than these."""
_FLUSH_BYTES, _SLOW_S = 16 << 20, 1.0
"""A file is flushed each time so much of it is written, until that takes so long."""
_READ_BYTES = 32 << 20
"""Read back and compared at once, by each thread."""
_PATIENCE_S = 1800.0
"""How long rank 0 waits for other ranks' parts before it gives up a save."""


class Parts:
    """Which rank writes which tensors. One per rank, created on all ranks at the same point."""

    def __init__(self, folder: RunFolder, world: World, token: str) -> None:
        self._world, self._token = world, token
        self._writers = _ranks_that_see(folder, world, token)
        self.count = len(self._writers)
        self.own = self._writers.index(world.rank) if world.rank in self._writers else None
        """The part that this rank writes; None: its host does not see the run folder."""

    def own_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.own is None:
            return {}
        names = divide({name: tensor.nbytes for name, tensor in tensors.items()}, self.count)[self.own]
        return {name: tensors[name] for name in names}

    def post(self, number: int, outcome: dict[str, Any]) -> None:
        """Tell rank 0 how this rank's part of a save went."""
        rank = self._world.rank
        # Rank 0 may not have concluded the save before this one, but the one before that.
        self._world.post(self._key(number, rank), outcome, instead_of=self._key(number - 2, rank))

    def outcomes_of_others(self, number: int, *, since: float) -> list[dict[str, Any]] | None:
        """How the other ranks' parts went; None while one is still being written."""
        outcomes = self._world.posted([self._key(number, rank) for rank in self._writers[1:]])
        if outcomes is None and time.monotonic() - since > _PATIENCE_S:
            return [{"error": f"the other ranks' parts are missing after {_PATIENCE_S:.0f} s"}]
        return outcomes

    def _key(self, number: int, rank: int) -> str:
        return f"saved/{self._token}/{number}/{rank}"


def divide(sizes: dict[str, int], parts: int) -> list[list[str]]:
    """Names distributed so that parts have about the same size; the same on every rank."""
    dealt: list[list[str]] = [[] for _ in range(parts)]
    load = [0] * parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = load.index(min(load))
        dealt[lightest].append(name)
        load[lightest] += sizes[name]
    return dealt


def _ranks_that_see(folder: RunFolder, world: World, token: str) -> list[int]:
    """Ranks whose host sees the run folder on a shared disk, always including rank 0."""
    mark = folder.checkpoints / f".seen-{token}"

    def make_mark() -> None:
        with suppress(OSError):  # a failing disk: rank 0 will report it when it saves
            mark.touch()

    world.on_rank0(make_mark)
    sees = world.gather(mark.exists() or world.is_rank0)
    world.on_rank0(lambda: mark.unlink(missing_ok=True))
    return [rank for rank, sees_it in enumerate(sees) if sees_it]


def write_large(
    tensors: dict[str, Tensor], folder: Path, *, part: int, parts: int, state_bytes: int, reached: Callable[[str], None]
) -> FileFacts:
    """As storage.write_tensors. state_bytes: of all parts together"""
    files = max(1, min(_FILES, round(state_bytes / parts / 2 / _FILE_BYTES)))
    contents = contents_of(tensors, folder, part=part, parts=parts, files=files)
    buffers = threading.local()

    def write(path: Path) -> int:
        size = write_file(path, contents[path], reached, after=_Flushing())
        if not hasattr(buffers, "own"):
            # Once: new pages cost more than reading into them. And no larger than needed: the allocator keeps them.
            buffers.own = memoryview(bytearray(min(_READ_BYTES, size)))
        _read_back(path, contents[path], buffers.own)
        return size

    # The largest first, or the others would have nothing to do while one of them is written at the end.
    paths = sorted(contents, key=lambda path: -sum(map(len, contents[path])))
    with ThreadPoolExecutor(_THREADS) as writers, ThreadPoolExecutor(_THREADS) as hashers:
        written, hashes = writers.map(write, paths), hashers.map(sha256_of, (contents[path] for path in paths))
        facts = zip(paths, written, hashes, strict=True)
        return {path.name: {"bytes": size, "sha256": sha256} for path, size, sha256 in facts}


class _Flushing:
    """Lets the disk work while a file is being written, not only at its end; one that is slow is not asked again."""

    def __init__(self) -> None:
        self._flushed_bytes, self._slow = 0, False

    def __call__(self, descriptor: int) -> None:
        written = os.lseek(descriptor, 0, os.SEEK_CUR)
        if not self._slow and written >= self._flushed_bytes + _FLUSH_BYTES:
            began = time.monotonic()
            os.fdatasync(descriptor)
            self._flushed_bytes, self._slow = written, time.monotonic() - began > _SLOW_S


def _read_back(path: Path, chunks: list[memoryview], buffer: memoryview) -> None:
    with path.open("rb") as file:
        for chunk in chunks:
            for start in range(0, len(chunk), len(buffer)):
                written = chunk[start : start + len(buffer)]
                read, words = buffer[: len(written)], len(written) // 8 * 8
                complete = file.readinto(read) == len(written)
                # Eight bytes at a time: ten times as fast as one.
                here, there = (numpy.frombuffer(each[:words], "u8") for each in (written, read))
                if not complete or not numpy.array_equal(here, there) or read[words:] != written[words:]:
                    raise OSError(errno.EIO, "what is read back is not what was written", str(path))
