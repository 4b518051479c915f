"""Copies beside a saver's own: on the GPU, in pinned memory, and snapshots of this host's share of the state.

Not loaded by a small run on CPUs that takes no snapshots.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drumline.checkpoint.checkpoints import RunState
from drumline.checkpoint.newest import set_aside
from drumline.checkpoint.parts import check_on_disk, write_large
from drumline.checkpoint.resuming import snapshot_folder
from drumline.checkpoint.storage import FileFacts
from drumline.files import RunFolder, make_private, stalled_share
from drumline.parallel import World
from drumline.pieces import in_pieces, is_spread, own_pieces, spread_of, without_writer
from drumline.snapshots import Copies, Layout, Remote, Snapshots, Staging, Taker, ranks_by_host, route

Tell = Callable[[str, dict[str, Any]], None]
_SWITCH_S = 0.0005
_NOTED_SHARE = 0.01
"""Of the time of a run."""


class InMemory:
    """One per rank."""

    def __init__(
        self,
        world: World,
        snapshots: Snapshots | None,
        model: nn.Module,
        *,
        every: int | None,
        token: str,
        tell: Tell,
    ) -> None:
        self._world, self._snapshots, self._tell, self._token = world, snapshots, tell, token
        self._copies = Copies(world.device)
        if world.device.type == "cuda":
            # Threads that write and copy need the interpreter for moments only, but each time they ask for it, the one
            # that launches kernels would keep it for 5 ms.
            sys.setswitchinterval(_SWITCH_S)
        self._part, self._parts = own_part(world)
        self._taker: Taker | None = None
        self._keepers: Sequence[int] | None = None
        """Of a state that is spread over ranks, those on this host that keep some of it."""
        self._snapshots_begun = self._snapshots_ended = 0
        remote: Remote | None = None
        if every != 0 and is_spread(model.parameters()) and any(world.gather(snapshots is not None)):
            hosts = ranks_by_host(snapshot_folder("any").parents[1], world)
            self._keepers = next(ranks for ranks in hosts if world.rank in ranks)
            self._part, self._parts = self._keepers.index(world.rank), len(self._keepers)
            copies = min(world.gather(snapshots.copies if snapshots else 1))
            if self._a_host_costs_shards(hosts, model, copies) and copies > 1:
                assert snapshots is not None
                way = route(hosts, world.rank, copies)
                remote, self._parts = Remote(snapshots, way), way.parts
        if snapshots and every != 0:
            self._taker = Taker(
                snapshots,
                self._copies,
                place=(self._part, self._parts),
                device=world.device,
                token=token,
                every=every,
                remote=remote,
                tell=tell,
            )
        self._names: list[str] | None = None
        self._state_bytes = 0
        self._staging = Staging(self._copies, world.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._staged: Future[None] | None = None
        self.times: dict[str, float] = {}
        """Seconds that the parts of the last save took on this rank."""

    def wants_snapshot(self, step: int) -> bool:
        """Whether to take a snapshot after this step; rank 0 decides for all ranks."""
        # Nobody may write over what the others still need: the newest snapshot that all ranks have completed.
        free = self._taker is not None and self._world.is_rank0 and self._others_have_ended()
        return free and self._taker is not None and self._taker.is_due(step)

    def take(self, tensors: dict[str, Tensor], state: RunState, *, snapshot: bool, began_s: float) -> None:
        """Copy the state where training does not change it, and start a snapshot of it."""
        self._copies.take(in_pieces(tensors, self._world.rank))
        self._state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._snapshots_begun += snapshot
        if snapshot and self._taker:
            self._taker.take(state.step, asdict(state), began_s=began_s)

    def to_host(self, own: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """What the saver writes, as it was taken; to be called in a thread."""
        if self._staged is not None:
            self._staged.exception()  # wait until its memory is there
        bring = self._staging.copy(own)

        def brought() -> dict[str, Tensor]:
            with self._timed("copy_s"):
                return bring()

        return brought

    def write(
        self, tensors: dict[str, Tensor], folder: Path, *, part: int, parts: int, reached: Callable[[str], None]
    ) -> FileFacts:
        """Write one part of a checkpoint's tensors."""
        with self._timed("write_s"):
            return write_large(tensors, folder, part=part, parts=parts, state_bytes=self._state_bytes, reached=reached)

    def check(self, checkpoint: Path, files: FileFacts, *, since: float) -> None:
        """Read a complete checkpoint back from the disk; one that is not what was written is set aside.

        since: when its save began
        """
        self.times["written_s"] = round(time.monotonic() - since, 4)
        with self._timed("check_s"):
            try:
                check_on_disk(checkpoint, files)
            except OSError:
                set_aside(checkpoint, "damaged")
                raise

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.times[name] = round(time.monotonic() - began, 4)

    def poll(
        self, tensors: Callable[[], dict[str, Tensor]], own: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    ) -> None:
        """Once per step: reserve the memory that is needed, and report what threads have done. Never waits.

        own: what the saver writes of the tensors
        """
        if self._names is None or (self._taker and self._taker.wants_memory()):
            self._prepare(tensors(), own)
        if self._taker:
            self._taker.poll()
        if self._snapshots_ended < self._snapshots_begun and not (self._taker and self._taker.is_under_way):
            self._snapshots_ended = self._snapshots_begun
            if self._keepers is not None:
                key = self._key(self._snapshots_ended, self._world.rank)
                self._world.post(key, True, instead_of=self._key(self._snapshots_ended - 2, self._world.rank))

    def _others_have_ended(self) -> bool:
        """Whether all ranks have completed their share of the last snapshot, or could not. Never waits."""
        if self._keepers is None or self._snapshots_begun == 0:
            return True
        keys = [self._key(self._snapshots_begun, rank) for rank in range(self._world.size)]
        return self._world.size == 1 or self._world.posted(keys) is not None

    def _key(self, number: int, rank: int) -> str:
        return f"snapshot/{self._token}/{number}/{rank}"

    def forget(self, folder: RunFolder) -> None:
        """Remove this run's snapshots on this host, and say what they and saves have cost, if it is much."""
        stalled = stalled_share(folder.events) if self._world.is_rank0 else None
        if stalled is not None and stalled > _NOTED_SHARE:
            how = "less often (--save_every, --snapshot_every) costs less"
            message = f"note: saves and snapshots held up training for {stalled:.1%} of its time; {how}"
            self._tell(message, {"event": "stalled", "share": round(stalled, 4)})
        if self._taker:
            self._taker.forget()
        elif self._snapshots:
            self._snapshots.clear()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._taker:
            self._taker.close()

    def _prepare(self, tensors: dict[str, Tensor], own: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        local = in_pieces(tensors, self._world.rank)
        if self._names is None:
            self._names = self._own_share(tensors)
            staged = own(tensors)
            self._staged = self._thread.submit(self._staging.prepare, Layout.of(staged))
            # What is in a snapshot comes first, in its order, so that it is copied in one piece.
            wanted = {name: local[name] for name in (*(self._names if self._taker else ()), *staged)}
            crowded = self._copies.prepare(wanted)
            if crowded:
                what = "each save and snapshot makes training wait for a copy to the host: without that it would take"
                self._tell(f"note: {what} {crowded}", {"event": "no copies on the GPU", "why": crowded})
        if self._taker:
            share = {name: local[name] for name in self._names}
            of_host = share if self._keepers else tensors
            copies = self._parts if self._keepers else 1
            self._taker.prepare(share, copies * sum(tensor.nbytes for tensor in of_host.values()))

    def _own_share(self, tensors: dict[str, Tensor]) -> list[str]:
        """What this rank keeps in a snapshot, by the names of pieces: all ranks of a host keep what is there once."""
        if self._keepers is None:
            return own_pieces(tensors, self._part, range(self._parts))
        return own_pieces(tensors, self._world.rank, self._keepers)

    def _a_host_costs_shards(self, hosts: list[list[int]], model: nn.Module, copies: int) -> bool:
        """Whether a lost host takes shards with it that no other one has, unless there are copies; says so."""
        spreads = {spread_of(parameter) for parameter in model.parameters()}
        without = [[rank for each in hosts if each is not lost for rank in each] for lost in hosts]
        if not any(without_writer(spreads, left) for left in without):
            return False
        if len(hosts) > 1 and copies == 1:
            what = "each shard is in the memory of one host: if that is lost, the run goes back to the disk"
            message = f"note: {what} (--snapshot_copies 2 keeps it on another host too)"
            self._tell(message, {"event": "no copies on other hosts"})
        return len(hosts) > 1


def snapshots_of(run: RunFolder) -> Snapshots:
    """The snapshots of a run on this host."""
    return Snapshots(snapshot_folder(run.run_id()), run.path)


def opened_snapshots(run: RunFolder, run_id: str, world: World, copies: int) -> Snapshots | None:
    """The same for a run that starts, if their place is this user's; the memory of runs that are gone is freed."""
    if not make_private(snapshot_folder(run_id).parent):
        return None
    snapshots = Snapshots(snapshot_folder(run_id), run.path, copies=copies)
    if world.place.local_rank == 0:
        snapshots.forget_others()
    return snapshots


def own_part(world: World) -> tuple[int, int]:
    """Which part of the state this rank keeps, of how many on its host; without a launcher that says so, all of it."""
    parts = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (world.place.local_rank, parts) if world.place.local_rank < parts else (0, 1)
