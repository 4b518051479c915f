"""The rank of a process and its world, and how ranks agree on something.

`World` is a single process, for which every collective is trivial. `group.Group` is the same for several ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from drumline.config import Backend, Device
from drumline.parallel.hardware import pick_device
from drumline.parallel.heartbeat import own_pulse

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Rank and world size of a process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


@dataclass(frozen=True)
class World:
    """All ranks of a run, from the view of one of them; here, the only one."""

    place: Place
    device: torch.device

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def is_group(self) -> bool:
        """Whether there is a process group, even with a single rank."""
        return False

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (any JSON), by rank; all ranks must call it."""
        return [value]

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Do the same on every rank; an error of one is raised on all, and reported by rank 0 with its rank."""
        return work()

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 only; its result (any JSON), or its error, is returned on all ranks."""
        return work()

    def post(self, key: str, value: Any, *, instead_of: str) -> None:
        """Post a message (any JSON) for `posted`. instead_of: the key of one that nobody will read any more"""

    def posted(self, keys: Sequence[str]) -> list[Any] | None:
        """What was posted under these keys; None while one is missing. Does not wait."""
        return None if keys else []

    def broadcast(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Copy one rank's tensors to all ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        return tensor


def own_place() -> Place:
    """This process's rank; a single process if there is no launcher."""
    if not {"RANK", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():
        return Place()
    from drumline.parallel.place import find_place

    return find_place(os.environ)


def join(*, device: Device = "auto", backend: Backend = "auto", bitwise: bool = False) -> World:
    """Join the other ranks. The group is destroyed by `leave`, or when the process exits.

    bitwise: also make computations in this process deterministic
    """
    place = own_place()
    where = pick_device(device)
    if bitwise:
        from drumline.parallel.bitwise import fix_arithmetic

        fix_arithmetic(where)
    if where.type == "cuda":
        from drumline.parallel.gpus import take_gpu

        where = take_gpu(place.local_rank)
    if place.size == 1 and ("RANK" not in os.environ or own_pulse().is_supervised):
        return World(place, where)
    from drumline.parallel.group import join_group

    return join_group(place, where, backend)


def leave() -> None:
    """Destroy the process group, if there is one."""
    if "drumline.parallel.group" in sys.modules:
        from drumline.parallel.group import leave_group

        leave_group()
