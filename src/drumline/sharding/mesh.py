"""Which ranks share a replica of the weights: all of them, or groups of consecutive ranks."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drumline.checkpoint import snapshot_folder
from drumline.errors import ConfigError
from drumline.parallel import World, own_pulse
from drumline.snapshots import ranks_by_host
from drumline.units import counted

Shard = int | Literal["none", "full", "host"]
REPLICATE, SHARD = "replicate", "shard"
"""Names of the dimensions of a mesh."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _MAPPED_BYTES = -1, -3, 16 << 20


def may_lose_hosts(world: World, *, hosts: tuple[int, int] = (1, 1)) -> bool:
    """Whether the number of ranks may change while the run goes on; all ranks must call it.

    hosts: the fewest and the most that the run was started for. A launcher that does not tell, as torchrun, has started
    ranks again.
    """
    return any(world.gather(hosts[0] < hosts[1] or own_pulse().started_again))


def check_shard(shard: Shard, world_size: int, *, elastic: bool = False) -> int:
    """The number of ranks that share a replica; refuses one that does not divide the ranks.

    Of `host`, it is what the launcher says; `make_mesh` looks for itself.
    elastic: take the next larger groups that divide the ranks instead, so that no rank needs more memory
    """
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if isinstance(shard, bool) or not re.fullmatch(r"full|host|-?\d+", str(shard)):
        raise ConfigError(
            f"shard is {shard!r}", fix="give none, full, host, or a whole number of ranks that share a replica"
        )
    size = {"full": world_size, "host": of_host}.get(str(shard)) or int(shard)
    if elastic and size >= 1 and str(shard) != "1":
        return next((n for n in range(max(2, size), world_size) if world_size % n == 0), world_size)
    if size < 1 or (size == 1 and world_size > 1) or str(shard) == "1":
        raise ConfigError(f"groups of {counted(size, 'rank')} share nothing", fix="use --shard full, or --shard none")
    if world_size % size:
        fitting = [str(n) for n in range(2, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"{counted(world_size, 'rank')} cannot be divided into groups of {size}, as --shard {size} asks",
            fix=f"use --shard full, or one of {', '.join(fitting)}" if fitting[1:] else "use --shard full",
        )
    return size


def size_of_groups(shard: Shard, world: World, *, elastic: bool, say: Callable[[str], None] = lambda line: None) -> int:
    """As `check_shard`, for the hosts as they are; all ranks must call it.

    say: called with a line if the groups are not those that were asked for
    """
    asked = _of_each_host(world, elastic=elastic) if shard == "host" else shard
    size = check_shard(asked or "full", world.size, elastic=elastic)
    if asked not in ("full", size):
        taken = f"in groups of {size}" if size < world.size else "over all of them"
        say(f"shard  {counted(world.size, 'rank')} cannot be divided as --shard {shard} asks: sharded {taken} for now")
    return size


def make_mesh(size: int, world: World) -> DeviceMesh:
    """("shard",) for one group; ("replicate", "shard") if there are several: so many consecutive ranks are a group."""
    if not dist.is_initialized():  # a single process: FSDP needs a group all the same
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(_leave)
    if world.device.type == "cpu":
        _give_back_what_is_freed()
    if size == world.size:
        return init_device_mesh(world.device.type, (size,), mesh_dim_names=(SHARD,))
    shape = (world.size // size, size)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=(REPLICATE, SHARD))


def _of_each_host(world: World, *, elastic: bool) -> Shard | None:
    """The number of ranks on each host; None if they differ, and may."""
    hosts = ranks_by_host(snapshot_folder("any").parents[1], world)
    if len(hosts) == 1:
        return "full"
    if any(ranks != list(range(place * len(ranks), (place + 1) * len(ranks))) for place, ranks in enumerate(hosts)):
        if elastic:
            return None
        raise ConfigError(
            f"--shard host needs as many ranks on each host, one after the other; the hosts have {hosts}",
            fix="start the same number of ranks on each host, or use --shard full",
        )
    return len(hosts[0])


def _give_back_what_is_freed() -> None:
    """glibc keeps freed tensors of up to 32 MB for later: with whole blocks that come and go, twice what is in use.

    Small ones it may keep: to map them anew takes longer.
    """
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _MAPPED_BYTES)  # as glibc does, until one of the two is set


def _leave() -> None:
    with suppress(RuntimeError, AssertionError, ValueError):
        dist.destroy_process_group()
