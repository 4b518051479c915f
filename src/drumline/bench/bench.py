"""`drumline bench`: how fast this machine trains, where a step's time goes, and what would be possible.

It runs the product's own steps on made-up tokens. All ranks call `run_bench`; what it gives is the same on each.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import drumline
from drumline.bench.ceilings import AllReduce, Ceilings, measure_all_reduce, measure_ceilings
from drumline.bench.config import BenchConfig
from drumline.bench.memory import Search, free_memory, limit_bytes, may_be_tried, search_batch_size, try_out
from drumline.bench.workload import Workload, part_seconds, step_seconds
from drumline.config import TrainConfig, preset
from drumline.data import BatchPlan, plan_batches
from drumline.errors import ConfigError
from drumline.parallel import World, allow_tf32, pick_dtype

_BUDGET_S, _ROW_BUDGET_S, _TABLE_S = 10.0, 1.5, 25.0
_SEARCHED_MICRO_BATCHES = 16

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table. What does not fit has no figures."""

    preset: str
    batch_size: int
    fits: bool
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was measured; also what --json holds."""

    versions: dict[str, str]
    device: str
    device_name: str
    threads: int
    """Of each rank, for what is computed on the CPU."""
    ranks: int
    dtype: str
    compiled: bool
    preset: str
    parameters: int
    context: int
    vocab_size: int
    batch_size: int
    micro_batches: int
    """Of a step, over all ranks."""
    global_batch_size: int
    tokens_per_step: int
    step_s: float
    steps_per_s: float
    tokens_per_s: float
    """Of all ranks together."""
    flops_per_token: int
    flops_per_s: float
    """Of one rank."""
    mfu: float
    """flops_per_s over that of the ceiling."""
    mfu_of: Literal["data sheet", "measured matrix product"]
    peak_memory_bytes: int
    """Of the rank that needs most: GPU memory, or else all that the process holds."""
    parts_s: dict[str, float]
    """They add up to step_s."""
    ceilings: Ceilings
    all_reduce: list[AllReduce]
    """Empty for a single rank."""
    table: list[Row]
    search: Search | None
    """What --find_batch_size found."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_bench(bench: BenchConfig, world: World, *, say: Say) -> Report:
    """Measure all of it, and say what is going on."""
    allow_tf32()
    chosen = bench.preset or ("modern" if world.device.type == "cuda" else "modern-tiny")
    config = bench.as_training(chosen)
    dtype = pick_dtype(config.run.dtype, world.device)
    plan, search = _plan(bench, config, world, say=say)
    say("measuring what the hardware can do: matrix products, copies" + (", sums" if world.size > 1 else ""))
    ceilings, all_reduce = measure_ceilings(world, dtype), measure_all_reduce(world)
    free_memory(world.device)
    say(f"timing steps of {chosen}: {plan.formula(world.size)}{', compiled' if bench.compile else ''}")
    # What the search has found, just so, is not judged again: memory never measures twice the same.
    limit = limit_bytes(world) if search is None else math.inf
    workload, peak_bytes, parts = _measure(config, plan, world, steps=bench.steps, limit=limit)
    step_s = sum(parts.values())
    tokens_per_s = workload.tokens_per_step / step_s
    flops_per_s = workload.flops_per_token * tokens_per_s / world.size
    report = Report(
        versions={"drumline": drumline.__version__, "torch": torch.__version__, "python": platform.python_version()},
        device=world.device.type,
        device_name=device_name(world.device),
        threads=torch.get_num_threads(),
        ranks=world.size,
        dtype=str(dtype).removeprefix("torch."),
        compiled=bench.compile,
        preset=chosen,
        parameters=workload.parameters,
        context=config.model.context or 0,
        vocab_size=config.data.vocab_size or 0,
        batch_size=plan.micro_batch_size,
        micro_batches=plan.micro_batches,
        global_batch_size=plan.sequences,
        tokens_per_step=workload.tokens_per_step,
        step_s=step_s,
        steps_per_s=1 / step_s,
        tokens_per_s=tokens_per_s,
        flops_per_token=workload.flops_per_token,
        flops_per_s=flops_per_s,
        mfu=flops_per_s / ceilings.flops_per_s,
        mfu_of="data sheet" if ceilings.datasheet_flops_per_s else "measured matrix product",
        peak_memory_bytes=peak_bytes,
        parts_s=parts,
        ceilings=ceilings,
        all_reduce=all_reduce,
        table=[],
        search=search,
    )
    del workload
    free_memory(world.device)
    return replace(report, table=_table(bench, report, world, say=say))


def _plan(bench: BenchConfig, config: TrainConfig, world: World, *, say: Say) -> tuple[BatchPlan, Search | None]:
    default = preset(config.model.preset).batch_size
    if not bench.find_batch_size:
        plan = plan_batches(config.batch, default_batch_size=default, world_size=world.size)
        plan.share(world.rank, world.size)
        return plan, None
    if world.device.type == "mps":
        raise ConfigError("memory cannot be measured on mps", fix="give a --batch_size, or use --device cpu")
    sequences = bench.global_batch_size or _SEARCHED_MICRO_BATCHES * default * world.size
    say(f"looking for the largest micro-batch of {config.model.preset} at {sequences} sequences per step")
    search = search_batch_size(config, world, global_batch_size=sequences, say=say)
    return BatchPlan(search.batch_size, sequences // search.batch_size), search


def _measure(
    config: TrainConfig, plan: BatchPlan, world: World, *, steps: int | None, limit: float
) -> tuple[Workload, int, dict[str, float]]:
    """The workload, the memory that its steps took, and the parts of a step."""
    started = _start(config, plan, world, limit=limit)
    if started is None:
        raise ConfigError(
            f"{config.model.preset} does not fit with batch_size {plan.micro_batch_size}: "
            f"{limit_bytes(world) / 1e9:.1f} GB of memory are free to use on each rank",
            fix="lower --batch_size, or let --find_batch_size find the largest that fits",
        )
    workload, peak_bytes = started
    return workload, peak_bytes, part_seconds(workload, steps=steps, budget_s=_BUDGET_S)


def _start(config: TrainConfig, plan: BatchPlan, world: World, *, limit: float) -> tuple[Workload, int] | None:
    """A workload that all ranks have memory for, and how much the one takes that needs most; None where one has not."""
    may = may_be_tried(config, plan, world, limit_bytes=limit)
    tried = try_out(config, plan, world) if may else None
    peaks = world.gather(tried[1] if tried else None)
    if tried is None or None in peaks or max(peaks) > limit:
        return None
    workload, _ = tried
    workload.join_ranks()
    return workload, max(peaks)


def _table(bench: BenchConfig, report: Report, world: World, *, say: Say) -> list[Row]:
    """Every preset with every batch size; on a slow machine, if nobody asked for the table, only its beginning."""
    rows: list[Row] = []
    asked = bench.table_presets is not None or bench.table_batch_sizes is not None
    names, began_s = bench.presets_of_table(report.preset), time.monotonic()
    for name in names:
        for batch_size in bench.batch_sizes_of_table(report.batch_size):
            if rows and not asked and world.on_rank0(lambda: time.monotonic() - began_s > _TABLE_S):
                say(f"the table takes too long; for all of it: --table_presets {','.join(names)}")
                return rows
            say(f"timing {name} with batch_size {batch_size}")
            rows.append(_row(bench.as_training(name), batch_size, report.ceilings, world))
    return rows


def _row(config: TrainConfig, batch_size: int, ceilings: Ceilings, world: World) -> Row:
    name = config.model.preset
    plan = BatchPlan(batch_size, world.size)
    started = _start(config, plan, world, limit=limit_bytes(world))
    if started is None:
        free_memory(world.device)
        return Row(preset=name, batch_size=batch_size, fits=False)
    workload, peak_bytes = started
    step_s = step_seconds(workload, budget_s=_ROW_BUDGET_S)
    tokens_per_s = workload.tokens_per_step / step_s
    flops_per_s = workload.flops_per_token * tokens_per_s / world.size
    del workload, started
    free_memory(world.device)
    return Row(
        preset=name,
        batch_size=batch_size,
        fits=True,
        steps_per_s=1 / step_s,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_s / ceilings.flops_per_s,
        peak_memory_bytes=peak_bytes,
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.processor() or platform.machine()
