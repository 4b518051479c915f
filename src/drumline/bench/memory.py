"""How much memory a step takes, how much is available, and the largest micro-batch that fits.

On a GPU, a batch that may be too large is simply tried: running out of memory is an ordinary error. On a CPU, the
kernel would kill this process or another one, so a batch is tried only if smaller ones predict that it fits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from drumline.bench.estimates import estimate
from drumline.bench.lighter import taken, ways
from drumline.bench.workload import Workload
from drumline.config import TrainConfig
from drumline.data import BatchPlan
from drumline.errors import ConfigError
from drumline.files import room_in_container
from drumline.parallel import World, pick_dtype

_USABLE = {"cuda": 0.95, "cpu": 0.8}
"""Fraction of free memory that a step may take: GPU memory fragments, and CPU memory is shared with others."""
_LOOK_EVERY_S = 0.002
_MARGIN = 1.2
"""Temporary buffers, on top of what is kept."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch size that was tried or estimated."""

    batch_size: int
    fits: bool
    peak_memory_bytes: int | None
    """Measured peak; None if it was not tried or ran out of memory."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The result of --find_batch_size."""

    batch_size: int
    global_batch_size: int
    limit_bytes: int
    trials: list[Trial]


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak memory within this block: of the GPU, or resident memory on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    process, done = psutil.Process(), threading.Event()
    most = process.memory_info().rss

    def watch() -> None:
        nonlocal most
        while not done.wait(_LOOK_EVERY_S):
            most = max(most, process.memory_info().rss)

    def look() -> int:
        return int(max(most, process.memory_info().rss))

    watcher = threading.Thread(target=watch, name="memory", daemon=True)
    watcher.start()
    try:
        yield look
    finally:
        done.set()
        watcher.join()


def limit_bytes(world: World) -> int:
    """The largest allowed `peak_memory` on this rank; the minimum over all ranks."""
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        own = torch.cuda.memory_reserved(world.device)
        return int(min(world.gather(_USABLE["cuda"] * (free + own))))
    free = _free_here()
    host = socket.gethostname()
    ranks_here = world.gather(host).count(host)
    own = psutil.Process().memory_info().rss
    return int(min(world.gather(own + _USABLE["cpu"] * free / ranks_here)))


def free_on_host(world: World) -> tuple[int, int]:
    """(bytes of memory that are free, ranks that share them) on the host with the least for each of its ranks.

    All ranks must call it.
    """
    hosts = world.gather([socket.gethostname(), _free_here()])
    shared = [(int(free), sum(host == other for other, _ in hosts)) for host, free in hosts]
    return min(shared, key=lambda each: each[0] / each[1])


def _free_here() -> int:
    return int(min(psutil.virtual_memory().available, room_in_container()))


def estimated_bytes(config: TrainConfig, world: World, batch_size: int) -> int:
    """Estimated peak memory of a step on a CPU, including everything else in the process, for a resolved config.

    The maximum over all ranks; a collective, so all ranks must call it.
    """
    context, vocab_size = config.model.context, config.data.vocab_size
    assert context and vocab_size
    memory = estimate(
        config,
        tokens=batch_size * context,
        vocab_size=vocab_size,
        device=world.device,
        dtype=pick_dtype(config.run.dtype, world.device),
        ranks=world.size,
        rounds=2,  # as `measure_peak` tries
    )
    own = psutil.Process().memory_info().rss + memory.state_bytes + _MARGIN * memory.step_bytes
    return int(max(world.gather(own)))


def may_be_tried(config: TrainConfig, plan: BatchPlan, world: World, *, limit_bytes: float) -> bool:
    """Whether trying is safe: running out of memory is harmless, or unlikely. All ranks must call it.

    An estimate that is too high does not rule a size out: then measurements of smaller batches decide.
    """
    foresee = partial(estimated_bytes, config, world)
    if world.device.type == "cuda" or foresee(plan.micro_batch_size) <= limit_bytes:
        return True
    sizes = sorted({max(1, plan.micro_batch_size // part) for part in (16, 8, 1)})
    measure = partial(measure_peak, config, world, plan.sequences)
    trials = find_batch_size(sizes, measure, limit_bytes=limit_bytes, foresee=foresee)
    return any(trial.fits for trial in trials if trial.batch_size == plan.micro_batch_size)


def try_out(config: TrainConfig, plan: BatchPlan, world: World) -> tuple[Workload, int] | None:
    """A workload after two steps, and their peak memory; None if it ran out of memory.

    Not a collective.
    """
    try:
        return _two_steps(config, plan, world)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    free_memory(world.device)  # the exception, and the tensors it referenced, are gone by now
    return None


def _two_steps(config: TrainConfig, plan: BatchPlan, world: World) -> tuple[Workload, int]:
    """Run two steps: the optimizer state is created in the first, so only the second has all of it from the start."""
    with peak_memory(world.device) as peak_bytes:
        workload = Workload(config, plan, world)
        for _ in range(2):
            workload.alone()
        return workload, peak_bytes() + _bytes_of_ranks(workload)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, from a GPU allocator, the CPU's, or CUDA libraries."""
    said = ("can't allocate memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in said)


def _bytes_of_ranks(workload: Workload) -> int:
    """With several ranks, gradients are kept between steps; a single rank frees them before the next forward."""
    world = workload.world
    accumulates = len(workload.plan.share(world.rank, world.size)) > 1
    return 0 if not world.is_group or accumulates else 4 * workload.parameters


def free_memory(device: torch.device) -> None:
    """Return unused memory. The caller must have dropped its references to the workload."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)


def measure_peak(config: TrainConfig, world: World, sequences: int, batch_size: int) -> int | None:
    """Peak memory of a step, the maximum over ranks; None if any rank ran out of memory. All ranks must call it.

    Two micro-batches are enough: during the second, the gradients of the first are already allocated.
    """
    each = max(1, min(2, sequences // (batch_size * world.size)))
    tried = try_out(config, BatchPlan(batch_size, each * world.size), world)
    peak_bytes = tried[1] if tried else None
    del tried
    free_memory(world.device)
    of_all = world.gather(peak_bytes)
    return None if None in of_all else max(of_all)


def search_batch_size(
    config: TrainConfig, world: World, *, global_batch_size: int, say: Callable[[str], None]
) -> Search:
    """The largest micro-batch that divides `global_batch_size`, leaves at least one per rank, and fits in memory."""
    sizes = [size for size in range(1, global_batch_size // world.size + 1) if global_batch_size % size == 0]
    limit = limit_bytes(world)
    if not sizes:
        raise ConfigError(
            f"{world.size} ranks cannot share a step of {global_batch_size} sequences",
            fix=f"raise --global_batch_size to {world.size} or more",
        )

    def measure(batch_size: int) -> int | None:
        say(f"trying batch_size {batch_size}")
        return measure_peak(config, world, global_batch_size, batch_size)

    foresee = None if world.device.type == "cuda" else partial(estimated_bytes, config, world)
    trials = find_batch_size(sizes, measure, limit_bytes=limit, foresee=foresee)
    fitting = [trial.batch_size for trial in trials if trial.fits]
    if not fitting:
        less = str(taken(config, ways(config, ranks=world.size, device=world.device)))
        raise ConfigError(
            f"{config.model.preset} does not fit with a single sequence: {limit / 1e9:.1f} GB of memory are free",
            fix="choose a smaller --preset, or a shorter --context"
            + (f"; `drumline train` needs less with {less}" if less else ""),
        )
    return Search(batch_size=max(fitting), global_batch_size=global_batch_size, limit_bytes=limit, trials=trials)


def find_batch_size(
    sizes: Sequence[int],
    measure: Callable[[int], int | None],
    *,
    limit_bytes: float,
    foresee: Callable[[int], int] | None,
) -> list[Trial]:
    """Double the size until one does not fit, then bisect. Returns every trial.

    sizes:   ascending; if one fits, so do all before it
    measure: the bytes that a size takes, or None if it runs out of memory
    foresee: an estimate, used where running out of memory must not happen; sizes estimated not to fit are not tried
    """
    trials: list[Trial] = []

    def fits(size: int) -> bool:
        if foresee is not None and _foreseen(size, trials, foresee) > limit_bytes:
            trials.append(Trial(batch_size=size, fits=False, peak_memory_bytes=None))
            return False
        peak_bytes = measure(size)
        fit = peak_bytes is not None and peak_bytes <= limit_bytes
        trials.append(Trial(batch_size=size, fits=fit, peak_memory_bytes=peak_bytes))
        return fit

    good, bad, at = -1, len(sizes), 0
    while at < bad:
        if fits(sizes[at]):
            good = at
            doubled = (place for place in range(at + 1, bad) if sizes[place] >= 2 * sizes[at])
            at = next(doubled, max(at + 1, len(sizes) - 1))
        else:
            bad = at
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(sizes[middle]) else (good, middle)
    return trials


def _foreseen(size: int, trials: Sequence[Trial], foresee: Callable[[int], int]) -> float:
    """Extrapolate from the two largest measured sizes; with fewer, scale the estimate by the measurement."""
    known = sorted((t.batch_size, t.peak_memory_bytes) for t in trials if t.peak_memory_bytes is not None)
    if not known:
        return foresee(size)
    at, peak = known[-1]
    if len(known) == 1:
        return peak + foresee(size) - foresee(at)
    before, peak_before = known[-2]
    return peak + max(0.0, (peak - peak_before) / (at - before)) * (size - at)
