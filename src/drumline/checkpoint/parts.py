"""One checkpoint in many pieces: each rank that sees the run folder writes a part, several files at the same time.

Files are hashed while they are written, and read back from the disk once the checkpoint is complete.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drumline.checkpoint.storage import FileFacts, contents_of
from drumline.errors import ConfigError
from drumline.files import RunFolder, sha256_on_disk, write_direct
from drumline.parallel import World
from drumline.pieces import in_pieces, own_pieces, spread_of, without_writer

_THREADS = 8
"""Files that are written or read at the same time: one thread hashes slower than disks write."""
_FILE_BYTES, _FILES = 128 << 20, 32
"""About as much is in one file of each kind, unless that would be more files than these."""
_PATIENCE_S = 1800.0
"""How long rank 0 waits for other ranks' parts before it gives up a save."""


class Parts:
    """Which rank writes which tensors. One per rank, created on all ranks at the same point."""

    def __init__(self, folder: RunFolder, world: World, token: str, model: nn.Module) -> None:
        """ConfigError: some of the model is only on ranks that do not see the folder"""
        self._world, self._token = world, token
        self._writers = _ranks_that_see(folder, world, token)
        self.count = len(self._writers)
        world.on_rank0(lambda: _check_written(folder, model, self._writers))
        self.own = self._writers.index(world.rank) if world.rank in self._writers else None
        """The part that this rank writes; None: its host does not see the run folder."""

    def own_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """What this rank writes, by the names of pieces."""
        own = in_pieces(tensors, self._world.rank)
        return {name: own[name] for name in own_pieces(tensors, self._world.rank, self._writers)}

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


def _check_written(folder: RunFolder, model: nn.Module, writers: list[int]) -> None:
    lost = without_writer(map(spread_of, model.parameters()), writers)
    if lost:
        raise ConfigError(
            f"rank {lost[0]} does not see {folder.path}, and no rank that does has the same shards of the model",
            fix="put --run_dir on a disk that all hosts share, or use --shard with the number of ranks on a host",
        )


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
    sizes = {path: sum(map(len, chunks)) for path, chunks in contents.items()}

    def write(path: Path) -> tuple[int, str]:
        return write_direct(path, contents[path], before=_points(path.name, sizes[path], reached))

    # The largest first, or the others would have nothing to do while one of them is written at the end.
    paths = sorted(contents, key=lambda path: -sizes[path])
    with ThreadPoolExecutor(_THREADS) as threads:
        written = threads.map(write, paths)
        return {path.name: {"bytes": n, "sha256": sha256} for path, (n, sha256) in zip(paths, written, strict=True)}


def _points(name: str, size: int, reached: Callable[[str], None]) -> Callable[[int], None]:
    """Names the points of a file's writing, from how much of it is written."""
    before = 0

    def at(written: int) -> None:
        nonlocal before
        for point, end in ((f"half of {name}", size // 2 + 1), (name, size)):
            if before < end <= written:
                reached(point)
        before = written

    return at


def check_on_disk(folder: Path, files: FileFacts) -> None:
    """Compare what the disk has of a checkpoint's files with what was written."""
    with ThreadPoolExecutor(_THREADS) as threads:
        for name, sha256 in zip(files, threads.map(lambda name: sha256_on_disk(folder / name), files), strict=True):
            if sha256 != files[name]["sha256"]:
                raise OSError(errno.EIO, "what is read back is not what was written", str(folder / name))
