"""Joining the other ranks of a script, however they were started, and checking that they train the same run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drumline.config import Backend, Device
from drumline.errors import ConfigError
from drumline.parallel import World, compare, join, take_gpu, versions


def joined(
    gpu: int | str | Path | None, *, device: Device = "auto", backend: Backend = "auto", bitwise: bool = False
) -> World:
    """The world of this process: its launcher's, or that of a process group which the script has made itself.

    gpu: the GPU to use, by number, if there is no launcher to say so
    """
    number = gpu if isinstance(gpu, int) else None
    if number is not None and torch.cuda.is_available() and not 0 <= number < torch.cuda.device_count():
        raise ConfigError(
            f"there is no GPU {number}: this machine has {torch.cuda.device_count()}",
            fix="use the local rank as the GPU's number, and start one rank per GPU",
        )
    if "RANK" not in os.environ and dist.is_available() and dist.is_initialized():  # as by mp.spawn
        rank, size = dist.get_rank(), dist.get_world_size()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank if number is None else number))
    world = join(device=device, backend=backend, bitwise=bitwise)
    if number is not None and world.size == 1 and world.device.type == "cuda":
        return replace(world, device=take_gpu(number))
    return world


def compare_ranks(world: World, facts: dict[str, Any], *, data: str) -> None:
    """Refuse to train if versions, settings or data differ between ranks."""
    if world.size == 1:
        return
    compare(world, {**versions(), **facts})
    if len(set(world.gather(data))) > 1:
        raise ConfigError(
            "each rank has other data: the samples that rank 0 reads are not those of the other ranks",
            fix="create the same dataset on every rank: call torch.manual_seed(0) before, and read the same files",
            reported=not world.is_rank0,
        )
