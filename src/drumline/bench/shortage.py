"""A batch that does not fit in memory: refused before the run starts, or explained when memory ran out."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import psutil
import torch

from drumline.bench.estimates import Memory, estimate
from drumline.bench.lighter import SMALLER, Way, lighter, on_more_gpus, taken, ways
from drumline.bench.memory import free_on_host, is_out_of_memory, limit_bytes
from drumline.config import TrainConfig, preset, with_preset
from drumline.data import plan_batches
from drumline.errors import ConfigError
from drumline.parallel import World, pick_dtype
from drumline.report import to_stderr
from drumline.sharding import check_sharding, may_lose_hosts, size_of_groups
from drumline.units import counted

_TOO_MUCH = 1.3
"""Estimates are not exact: what needs a little more than is free may still fit."""
_LESS = 0.99
"""What does not even save so much is not worth naming."""


def check_memory(config: TrainConfig, world: World) -> None:
    """Refuse what needs much more memory than is free, for a resolved config. All ranks must call it."""
    free = limit_bytes(world)
    on_host, ranks_here = free_on_host(world)
    if config.model.model != "gpt":
        return
    if config.ranks.shard != "none":
        elastic = may_lose_hosts(world, hosts=config.ranks.hosts)
        world.on_all_ranks(lambda: check_sharding(config, ranks=world.size, device=world.device, elastic=elastic))
        size = size_of_groups(config.ranks.shard, world, elastic=elastic)
        config = replace(config, ranks=replace(config.ranks, shard=size if size < world.size else "full"))
    _check_host(config, world, on_host, ranks_here, free_of_rank=free)
    batch_size = config.batch.batch_size
    assert batch_size and config.model.context
    needed = _needed(config, world, batch_size)
    if needed <= free:
        return
    problem = (
        f"a step needs about {needed / 1e9:,.1f} GB for {counted(batch_size, 'sequence')} of "
        f"{config.model.context:,} tokens at once, but {free / 1e9:,.1f} GB of memory are free for a rank on "
        f"{world.device.type}"
    )
    room = on_host / ranks_here if world.device.type == "cuda" else 0.0
    _refuse(problem, _to_fit(config, world, free, room=room), world, is_much=needed > _TOO_MUCH * free)


def _check_host(config: TrainConfig, world: World, free: int, ranks: int, *, free_of_rank: int) -> None:
    """The same for what is offloaded to hosts of so many ranks."""
    batch_size = config.batch.batch_size or 1
    needed = ranks * _estimate(config, world, batch_size).host_bytes
    if needed <= free:
        return
    problem = (
        f"--offload {config.run.offload} keeps about {needed / 1e9:,.1f} GB for {counted(ranks, 'rank')} in the memory "
        f"of a host, where {free / 1e9:,.1f} GB are free"
    )
    without = replace(config, run=replace(config.run, offload="none"))
    whole = replace(config, ranks=replace(config.ranks, shard="full"))
    if _needed(without, world, batch_size) <= free_of_rank:
        fix = "drop --offload: without it, the run fits on the GPU"
    elif ranks * _estimate(whole, world, batch_size).host_bytes <= free:
        fix = "use --shard full, with which each rank keeps less"
    else:
        fix = f"use more hosts with --shard full, or {SMALLER}"
    _refuse(problem, fix, world, is_much=needed > _TOO_MUCH * free)


def _refuse(problem: str, fix: str, world: World, *, is_much: bool) -> None:
    if is_much:
        raise ConfigError(problem, fix=fix)
    if world.is_rank0:
        to_stderr(f"warning: {problem}\n  fix: {fix}")


def _to_fit(config: TrainConfig, world: World, free: int, *, room: float) -> str:
    """What to change. room: what a rank may offload, in bytes"""
    assert config.batch.batch_size and config.batch.global_batch_size
    size, sequences = config.batch.batch_size, config.batch.global_batch_size
    sizes = sorted(_divisors(sequences, world.size))
    fitting = [size for size in sizes if _needed(config, world, size) <= free]
    if fitting:
        return _in_parts(max(fitting), sequences)
    for each in lighter(config, ranks=world.size, device=world.device):
        if _estimate(each.config, world, size).host_bytes > room:
            continue
        for smaller in (size, sizes[0]):
            if _needed(each.config, world, smaller) <= free:
                return f"add {each}" + (f"; {_in_parts(smaller, sequences)}" if smaller != size else "")
    less = _helping(config, world, sizes[0], room=room)
    beside = on_more_gpus(config, ranks=world.size, device=world.device)
    return f"add {less}, and {beside}{SMALLER}" if less else f"{beside}{SMALLER}"


def _helping(config: TrainConfig, world: World, size: int, *, room: float) -> str:
    """The flags with which a step of the smallest micro-batches needs less, each of them beside those before it."""
    before, chosen = _needed(config, world, size), list[Way]()
    for way in ways(config, ranks=world.size, device=world.device):
        with_it = taken(config, [*chosen, way]).config
        needed = _needed(with_it, world, size)
        if needed < _LESS * before and _estimate(with_it, world, size).host_bytes <= room:
            before, chosen = needed, [*chosen, way]
    return str(taken(config, chosen))


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
        f"out of memory on {where} with {counted(size, 'sequence')} of {config.model.context:,} tokens at once",
        fix=_after_shortage(config, world, _in_parts(max(smaller), sequences) if smaller else ""),
        details=[said[0][:200]],
    ) from error


def _after_shortage(config: TrainConfig, world: World, in_parts: str) -> str:
    """What to change, as nobody knows how much was missing."""
    less = str(taken(config, ways(config, ranks=world.size, device=world.device)))
    if in_parts:
        found = f"{in_parts}; `drumline bench --find_batch_size` finds the largest"
        return f"{found}; {less} takes less memory too" if less else found
    beside = on_more_gpus(config, ranks=world.size, device=world.device)
    return f"add {less}, or {beside}{SMALLER}" if less else f"{beside}{SMALLER}"


def _needed(config: TrainConfig, world: World, batch_size: int) -> int:
    """Estimated memory of a rank, in bytes."""
    own = psutil.Process().memory_info().rss if world.device.type == "cpu" else 0
    return own + _estimate(config, world, batch_size).peak_bytes


def _estimate(config: TrainConfig, world: World, batch_size: int) -> Memory:
    assert config.model.context and config.data.vocab_size and config.batch.global_batch_size
    return estimate(
        config,
        tokens=batch_size * config.model.context,
        vocab_size=config.data.vocab_size,
        device=world.device,
        dtype=pick_dtype(config.run.dtype, world.device),
        ranks=world.size,
        rounds=-(-config.batch.global_batch_size // (batch_size * world.size)),
    )


def _divisors(sequences: int, ranks: int) -> list[int]:
    """The sizes of a micro-batch into which ranks can divide a step."""
    small = [size for size in range(1, int(sequences**0.5) + 1) if sequences % size == 0]
    return [size for size in {*small, *(sequences // size for size in small)} if size <= sequences // ranks]


def _in_parts(batch_size: int, sequences: int) -> str:
    return f"--batch_size {batch_size} --global_batch_size {sequences} computes the same step in smaller parts"
