"""`drumline bench`: training throughput, where step time goes, and the hardware limits.

It runs real training steps on random tokens. All ranks call `run_bench` and get the same result.
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
    """One row of the table. A configuration that does not fit has no figures."""

    preset: str
    batch_size: int
    fits: bool
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """All measurements; also the content of --json."""

    versions: dict[str, str]
    device: str
    device_name: str
    threads: int
    """CPU threads of each rank."""
    ranks: int
    dtype: str
    compiled: bool
    preset: str
    parameters: int
    context: int
    vocab_size: int
    batch_size: int
    micro_batches: int
    """Tokens per step, over all ranks."""
    global_batch_size: int
    tokens_per_step: int
    step_s: float
    steps_per_s: float
    tokens_per_s: float
    """Over all ranks."""
    flops_per_token: int
    flops_per_s: float
    """Per rank."""
    mfu: float
    """flops_per_s as a fraction of the ceiling."""
    mfu_of: Literal["data sheet", "measured matrix product"]
    peak_memory_bytes: int
    """Of the rank that needs the most: GPU memory, or resident memory of the process on a CPU."""
    parts_s: dict[str, float]
    """Seconds by part; they add up to step_s."""
    ceilings: Ceilings
    all_reduce: list[AllReduce]
    """Empty with a single rank."""
    table: list[Row]
    search: Search | None
    """The result of --find_batch_size."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_bench(bench: BenchConfig, world: World, *, say: Say) -> Report:
    """Run the whole benchmark, reporting progress through `say`."""
    allow_tf32()
    chosen = bench.preset or ("modern" if world.device.type == "cuda" else "modern-tiny")
    config = bench.as_training(chosen)
    dtype = pick_dtype(config.run.dtype, world.device)
    plan, search = _plan(bench, config, world, say=say)
    say("measuring hardware limits: matmul, memory copy" + (", all-reduce" if world.size > 1 else ""))
    ceilings, all_reduce = measure_ceilings(world, dtype), measure_all_reduce(world)
    free_memory(world.device)
    say(f"timing steps of {chosen}: {plan.formula(world.size)}{', compiled' if bench.compile else ''}")
    # A batch size that the search found is not checked again: memory use is never exactly the same twice.
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
        raise ConfigError("memory cannot be measured on mps", fix="set --batch_size, or use --device cpu")
    sequences = bench.global_batch_size or _SEARCHED_MICRO_BATCHES * default * world.size
    say(f"searching for the largest micro-batch of {config.model.preset} with {sequences} sequences per step")
    search = search_batch_size(config, world, global_batch_size=sequences, say=say)
    return BatchPlan(search.batch_size, sequences // search.batch_size), search


def _measure(
    config: TrainConfig, plan: BatchPlan, world: World, *, steps: int | None, limit: float
) -> tuple[Workload, int, dict[str, float]]:
    """The workload, its peak memory, and the parts of a step."""
    started = _start(config, plan, world, limit=limit)
    if started is None:
        raise ConfigError(
            f"{config.model.preset} does not fit with batch_size {plan.micro_batch_size}: "
            f"each rank has {limit_bytes(world) / 1e9:.1f} GB of free memory",
            fix="lower --batch_size, or use --find_batch_size to find the largest that fits",
        )
    workload, peak_bytes = started
    return workload, peak_bytes, part_seconds(workload, steps=steps, budget_s=_BUDGET_S)


def _start(config: TrainConfig, plan: BatchPlan, world: World, *, limit: float) -> tuple[Workload, int] | None:
    """A workload that fits on all ranks, and the most memory that any rank uses; None if it does not fit."""
    may = may_be_tried(config, plan, world, limit_bytes=limit)
    tried = try_out(config, plan, world) if may else None
    peaks = world.gather(tried[1] if tried else None)
    if tried is None or None in peaks or max(peaks) > limit:
        return None
    workload, _ = tried
    workload.join_ranks()
    return workload, max(peaks)


def _table(bench: BenchConfig, report: Report, world: World, *, say: Say) -> list[Row]:
    """Time every preset with every batch size. Stops early on a slow machine unless the table was requested."""
    rows: list[Row] = []
    asked = bench.table_presets is not None or bench.table_batch_sizes is not None
    names, began_s = bench.presets_of_table(report.preset), time.monotonic()
    for name in names:
        for batch_size in bench.batch_sizes_of_table(report.batch_size):
            if rows and not asked and world.on_rank0(lambda: time.monotonic() - began_s > _TABLE_S):
                say(f"skipping the rest of the table to save time; for all of it: --table_presets {','.join(names)}")
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
