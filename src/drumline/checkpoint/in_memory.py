"""Copies beside a saver's own: on the GPU, in pinned memory, and snapshots of this host's share of the state.

Not loaded by a small run on CPUs that takes no snapshots.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.checkpoint.checkpoints import RunState
from drumline.checkpoint.parts import divide, write_large
from drumline.checkpoint.resuming import snapshot_folder
from drumline.checkpoint.storage import FileFacts
from drumline.files import RunFolder, make_private, stalled_share
from drumline.parallel import World
from drumline.snapshots import Copies, Layout, Snapshots, Staging, Taker

Tell = Callable[[str, dict[str, Any]], None]
_SWITCH_S = 0.0005
_NOTED_SHARE = 0.01
"""Of the time of a run."""


class InMemory:
    """One per rank."""

    def __init__(self, world: World, snapshots: Snapshots | None, *, every: int | None, token: str, tell: Tell) -> None:
        self._world, self._snapshots, self._tell = world, snapshots, tell
        self._copies = Copies(world.device)
        if world.device.type == "cuda":
            # Threads that write and copy need the interpreter for moments only, but each time they ask for it, the one
            # that launches kernels would keep it for 5 ms.
            sys.setswitchinterval(_SWITCH_S)
        self._part, self._parts = own_part(world)
        self._taker: Taker | None = None
        if snapshots and every != 0:
            self._taker = Taker(
                snapshots,
                self._copies,
                place=(self._part, self._parts),
                device=world.device,
                token=token,
                every=every,
                tell=tell,
            )
        self._names: list[str] | None = None
        self._state_bytes = 0
        self._staging = Staging(self._copies, world.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging")
        self._staged: Future[None] | None = None

    def wants_snapshot(self, step: int) -> bool:
        """Whether to take a snapshot after this step; rank 0 decides for all ranks."""
        return self._taker is not None and self._world.is_rank0 and self._taker.is_due(step)

    def take(self, tensors: dict[str, Tensor], state: RunState, *, snapshot: bool, began_s: float) -> None:
        """Copy the state where training does not change it, and start a snapshot of it."""
        self._copies.take(tensors)
        self._state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if snapshot and self._taker:
            self._taker.take(state.step, asdict(state), began_s=began_s)

    def to_host(self, own: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """What the saver writes, as it was taken; to be called in a thread."""
        if self._staged is not None:
            self._staged.exception()  # wait until its memory is there
        return self._staging.copy(own)

    def write(
        self, tensors: dict[str, Tensor], folder: Path, *, part: int, parts: int, reached: Callable[[str], None]
    ) -> FileFacts:
        """Write one part of a checkpoint's tensors."""
        return write_large(tensors, folder, part=part, parts=parts, state_bytes=self._state_bytes, reached=reached)

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
        if self._names is None:
            sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
            self._names = divide(sizes, self._parts)[self._part]
            staged = own(tensors)
            self._staged = self._thread.submit(self._staging.prepare, Layout.of(staged))
            # What is in a snapshot comes first, in its order, so that it is copied in one piece.
            wanted = {name: tensors[name] for name in (*(self._names if self._taker else ()), *staged)}
            crowded = self._copies.prepare(wanted)
            if crowded:
                what = "each save and snapshot makes training wait for a copy to the host: without that it would take"
                self._tell(f"note: {what} {crowded}", {"event": "no copies on the GPU", "why": crowded})
        if self._taker:
            share = {name: tensors[name] for name in self._names}
            self._taker.prepare(share, sum(tensor.nbytes for tensor in tensors.values()))


def snapshots_of(run: RunFolder) -> Snapshots:
    """The snapshots of a run on this host."""
    return Snapshots(snapshot_folder(run.run_id()), run.path)


def opened_snapshots(run: RunFolder, run_id: str, world: World) -> Snapshots | None:
    """The same for a run that starts, if their place is this user's; the memory of runs that are gone is freed."""
    if not make_private(snapshot_folder(run_id).parent):
        return None
    snapshots = Snapshots(snapshot_folder(run_id), run.path)
    if world.place.local_rank == 0:
        snapshots.forget_others()
    return snapshots


def own_part(world: World) -> tuple[int, int]:
    """Which part of the state this rank keeps, of how many on its host; without a launcher that says so, all of it."""
    parts = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (world.place.local_rank, parts) if world.place.local_rank < parts else (0, 1)
