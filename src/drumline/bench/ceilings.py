"""Measured hardware limits: matmul, memory copy, and all-reduce.

Independent of any model. Every figure is the median of several rounds after a warmup round.
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
"""Minimum duration of a round, so that timer overhead is negligible."""
_MOST_REPEATS = 200
_PRODUCT_SIZES = {"cpu": (512, 1024), "mps": (1024, 2048, 4096), "cuda": (4096, 8192, 16384)}
_COPY_BYTES = {"cpu": 1 << 27, "mps": 1 << 28, "cuda": 1 << 30}
"""Far larger than any cache."""
_ALL_REDUCE_BYTES = {"cpu": (1 << 16, 1 << 20, 1 << 24, 1 << 26), "cuda": (1 << 16, 1 << 20, 1 << 24, 1 << 28)}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Per rank, while all ranks measure at the same time."""

    matmul_flops_per_s: float
    """The fastest of several square matmul sizes, in the run's dtype."""
    datasheet_flops_per_s: float | None
    """From the vendor's data sheet; None if unknown."""
    copy_bytes_per_s: float
    """Bytes read and written per second while copying a large tensor."""

    @property
    def flops_per_s(self) -> float:
        """The reference for MFU."""
        return self.datasheet_flops_per_s or self.matmul_flops_per_s


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """An all-reduce of this many bytes."""

    bytes: int
    seconds: float
    bytes_per_s: float
    """Bus bandwidth per rank: any algorithm sends and receives 2 (n - 1) / n of the tensor per rank."""


def seconds(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Time per call, averaged over `repeats` back-to-back calls, from an idle device to an idle device."""
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
    """Wait for all ranks."""
    world.sum(torch.zeros(1, device=world.device)).item()


def measure_ceilings(world: World, dtype: torch.dtype) -> Ceilings:
    """Measure on all ranks at once: ranks on one machine share its memory bandwidth."""
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
    """All-reduce by size, in float32 like the gradients; empty with a single rank."""
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
    """The median of several rounds; all ranks start each round together and take the slowest rank's time."""
    start_together(world)
    work()  # warmup: one-time setup and loading
    once_s = max(world.gather(seconds(work, world.device, repeats=1)))
    repeats = max(1, min(_MOST_REPEATS, round(_TURN_S / once_s)))
    turns = []
    for _ in range(_TURNS):
        start_together(world)
        turns.append(seconds(work, world.device, repeats=repeats))
    return statistics.median(turns)
