"""A batch that does not fit in memory: refused before the run starts, or explained when memory ran out."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import psutil
import torch

from drumline.bench.estimates import estimate
from drumline.bench.memory import is_out_of_memory, limit_bytes
from drumline.config import TrainConfig, preset, with_preset
from drumline.data import plan_batches
from drumline.errors import ConfigError
from drumline.parallel import World, pick_dtype
from drumline.report import to_stderr
from drumline.sharding import check_sharding, may_lose_hosts, size_of_groups

_TOO_MUCH = 1.3
"""Estimates are not exact: what needs a little more than is free may still fit."""
_SMALLER = "choose a smaller model (--preset, --n_layers, --d_model) or a shorter --context"


def check_memory(config: TrainConfig, world: World) -> None:
    """Refuse micro-batches that need much more memory than is free, for a resolved config. All ranks must call it."""
    free = limit_bytes(world)
    if config.model.model != "gpt":
        return
    batch_size, sequences = config.batch.batch_size, config.batch.global_batch_size
    assert batch_size and sequences
    if config.ranks.shard != "none":
        elastic = may_lose_hosts(world, hosts=config.ranks.hosts)
        world.on_all_ranks(lambda: check_sharding(config, ranks=world.size, device=world.device, elastic=elastic))
        size = size_of_groups(config.ranks.shard, world, elastic=elastic)
        config = replace(config, ranks=replace(config.ranks, shard=size if size < world.size else "full"))
    needed = _needed(config, world, batch_size)
    if needed <= free:
        return
    fitting = [size for size in _divisors(sequences, world.size) if _needed(config, world, size) <= free]
    problem = (
        f"a step needs about {needed / 1e9:,.1f} GB for {batch_size:,} sequences of {config.model.context:,} tokens at "
        f"once, but {free / 1e9:,.1f} GB of memory are free for a rank on {world.device.type}"
    )
    fix = _in_parts(max(fitting), sequences) if fitting else _SMALLER
    if needed > _TOO_MUCH * free:
        raise ConfigError(problem, fix=fix)
    if world.is_rank0:
        to_stderr(f"warning: {problem}\n  fix: {fix}")


def explain_memory(error: BaseException, config: TrainConfig, world: World) -> None:
    """If an error means that memory ran out, raise one that says what to change instead."""
    if is_out_of_memory(error):
        _raise_shortage(error, with_preset(config), world)


def _raise_shortage(error: BaseException, config: TrainConfig, world: World) -> NoReturn:
    plan = plan_batches(
        config.batch, default_batch_size=preset(config.model.preset).batch_size, world_size=max(1, world.size)
    )
    size, sequences = plan.micro_batch_size, plan.sequences
    smaller = [each for each in _divisors(sequences, world.size) if each <= size // 2]
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "the CPU"
    said = str(error).strip().splitlines() or [type(error).__name__]
    raise ConfigError(
        f"out of memory on {where} with {size:,} sequences of {config.model.context:,} tokens at once",
        fix=f"{_in_parts(max(smaller), sequences)}; `drumline bench --find_batch_size` finds the largest"
        if smaller
        else _SMALLER,
        details=[said[0][:200]],
    ) from error


def _needed(config: TrainConfig, world: World, batch_size: int) -> int:
    """Estimated memory of a rank, in bytes."""
    assert config.model.context and config.data.vocab_size and config.batch.global_batch_size
    memory = estimate(
        config,
        tokens=batch_size * config.model.context,
        vocab_size=config.data.vocab_size,
        device=world.device,
        dtype=pick_dtype(config.run.dtype, world.device),
        ranks=world.size,
        rounds=-(-config.batch.global_batch_size // (batch_size * world.size)),
    )
    own = psutil.Process().memory_info().rss if world.device.type == "cpu" else 0
    return own + memory.peak_bytes


def _divisors(sequences: int, ranks: int) -> list[int]:
    """The sizes of a micro-batch into which ranks can divide a step."""
    small = [size for size in range(1, int(sequences**0.5) + 1) if sequences % size == 0]
    return [size for size in {*small, *(sequences // size for size in small)} if size <= sequences // ranks]


def _in_parts(batch_size: int, sequences: int) -> str:
    return f"--batch_size {batch_size} --global_batch_size {sequences} computes the same step in smaller parts"
