"""What the hardware can do at best, measured: matrix products, copies, and sums over all ranks.

Nothing here knows a model. Every figure is the median of several turns, after one that warms up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from drumline.parallel import World, peak_flops

_TURNS = 5
_TURN_S = 0.05
"""How long a turn should be at least, so that starting the clock costs nothing beside it."""
_MOST_REPEATS = 200
_PRODUCT_SIZES = {"cpu": (512, 1024), "mps": (1024, 2048, 4096), "cuda": (4096, 8192, 16384)}
_COPY_BYTES = {"cpu": 1 << 27, "mps": 1 << 28, "cuda": 1 << 30}
"""Far more than any cache holds."""
_ALL_REDUCE_BYTES = {"cpu": (1 << 16, 1 << 20, 1 << 24, 1 << 26), "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28)}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Of one rank, while all ranks measure at once."""

    matmul_flops_per_s: float
    """The fastest of several sizes of square matrix products, in the run's number format."""
    datasheet_flops_per_s: float | None
    """What the maker promises; None where it is not known."""
    copy_bytes_per_s: float
    """Bytes read and written while a large tensor is copied."""

    @property
    def flops_per_s(self) -> float:
        """What a run's speed is a share of."""
        return self.datasheet_flops_per_s or self.matmul_flops_per_s


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A tensor of this many bytes summed over all ranks."""

    bytes: int
    seconds: float
    bytes_per_s: float
    """Over each rank's link: a sum has to send and receive 2 (n - 1) / n of the tensor there, whatever the method."""


def seconds(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """What a call takes, averaged over `repeats` in a row, from an idle device until it is idle again."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def start_together(world: World) -> None:
    """Let all ranks get here before any goes on."""
    world.sum(torch.zeros(1, device=world.device)).item()


def measure_ceilings(world: World, dtype: torch.dtype) -> Ceilings:
    """All ranks call it: ranks that share a machine share its memory, and should."""
    device = world.device
    own = [_matmul_flops_per_s(world, dtype), _copy_bytes_per_s(world)]
    of_all = world.gather(own)
    return Ceilings(
        matmul_flops_per_s=statistics.mean(each[0] for each in of_all),
        datasheet_flops_per_s=peak_flops(device, dtype),
        copy_bytes_per_s=statistics.mean(each[1] for each in of_all),
    )


def _matmul_flops_per_s(world: World, dtype: torch.dtype) -> float:
    best = 0.0
    for size in _PRODUCT_SIZES[world.device.type]:
        left, right = (torch.randn(size, size, device=world.device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(left)
        best = max(best, 2 * size**3 / _median_s(partial(torch.mm, left, right, out=out), world))
    return best


def _copy_bytes_per_s(world: World) -> float:
    size = _COPY_BYTES[world.device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    return 2 * size / _median_s(partial(target.copy_, source), world)


def measure_all_reduce(world: World) -> list[AllReduce]:
    """By size; nothing for a single rank. float32, as gradients are."""
    if world.size == 1:
        return []
    measured = []
    for size in _ALL_REDUCE_BYTES["cuda" if world.device.type == "cuda" else "cpu"]:
        tensor = torch.zeros(size // 4, device=world.device)
        took_s = max(world.gather(_median_s(partial(world.sum, tensor), world)))
        sent = 2 * (world.size - 1) / world.size * size
        measured.append(AllReduce(bytes=size, seconds=took_s, bytes_per_s=sent / took_s))
    return measured


def _median_s(work: Callable[[], object], world: World) -> float:
    """Of several turns, each started by all ranks at once and as long on all of them."""
    start_together(world)
    work()  # whatever is set up or loaded at its first use
    once_s = max(world.gather(seconds(work, world.device, repeats=1)))
    repeats = max(1, min(_MOST_REPEATS, round(_TURN_S / once_s)))
    turns = []
    for _ in range(_TURNS):
        start_together(world)
        turns.append(seconds(work, world.device, repeats=repeats))
    return statistics.median(turns)
