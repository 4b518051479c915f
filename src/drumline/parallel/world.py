"""Who am I, and who else is there: a process's place among the ranks, and how they agree on something.

`World` is a single process: everything it asks of "all ranks" it answers itself. `group.Group` is the same for many.
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

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a process stands among all ranks of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


@dataclass(frozen=True)
class World:
    """All ranks of a run, as one of them sees it; this one is alone."""

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
        """Whether tensors travel through a process group, be it one of a single rank."""
        return False

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value (anything JSON can hold), by rank; all ranks call it at the same point."""
        return [value]

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        """Do the same on every rank; an error of one is raised on all, and told by rank 0 with whose it was."""
        return work()

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 alone; its result (anything JSON can hold), or its error, is everyone's."""
        return work()

    def post(self, key: str, value: Any) -> None:
        """Leave word (anything JSON can hold) for whoever asks with `posted`."""

    def posted(self, keys: Sequence[str]) -> list[Any] | None:
        """What was posted under these keys; None as long as one is missing. Does not wait."""
        return None if keys else []

    def broadcast(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Make everyone's tensors those of one rank."""

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        return tensor


def own_place() -> Place:
    """This process's place among the ranks; a single process where no launcher says otherwise."""
    if not {"RANK", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():
        return Place()
    from drumline.parallel.place import find_place

    return find_place(os.environ)


def join(*, device: Device = "auto", backend: Backend = "auto", bitwise: bool = False) -> World:
    """Take this process's place among the ranks. The group is torn down by `leave`, or when the process ends.

    bitwise: also make this process compute the same bits as any other would
    """
    place = own_place()
    where = pick_device(device)
    if bitwise:
        from drumline.parallel.bitwise import fix_arithmetic

        fix_arithmetic(where)
    if where.type == "cuda":
        from drumline.parallel.gpus import take_gpu

        where = take_gpu(place.local_rank)
    if place.size == 1 and "RANK" not in os.environ:
        return World(place, where)
    from drumline.parallel.group import join_group

    return join_group(place, where, backend)


def leave() -> None:
    """Tear the process group down, where there is one."""
    if "drumline.parallel.group" in sys.modules:
        from drumline.parallel.group import leave_group

        leave_group()
