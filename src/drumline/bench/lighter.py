"""Settings with which a step takes less memory: those that a run could use and does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from drumline.config import TrainConfig
from drumline.parallel import pick_dtype
from drumline.sharding import check_shard

SMALLER = "choose a smaller model (--preset, --n_layers, --d_model) or a shorter --context"


@dataclass(frozen=True)
class Lighter:
    """A config with less to keep, and the flags that make it of the one before."""

    config: TrainConfig
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.flags)


Way = Callable[[Lighter], Lighter]


def ways(config: TrainConfig, *, ranks: int, device: torch.device) -> list[Way]:
    """Those that this run could take, and has not taken."""
    found: list[Way] = []
    run, own = config.run, config.model.model == "gpt"
    if run.fp8:
        return []
    may_shard = pick_dtype(run.dtype, device) != torch.float16
    if may_shard and ranks > 1 and (config.ranks.shard == "none" or _size(config, ranks) < ranks):
        found.append(_sharded)
    if own and run.activation_checkpointing != "block":
        found.append(_recomputed)
    if may_shard and device.type == "cuda" and run.offload == "none":
        found.append(_offloaded)
    return found


def lighter(config: TrainConfig, *, ranks: int, device: torch.device) -> Iterator[Lighter]:
    """With one of the ways, with two, with all; first those without offloading, which makes steps slower."""
    found = ways(config, ranks=ranks, device=device)
    chosen = [each for count in range(1, len(found) + 1) for each in combinations(found, count)]
    for each in sorted(chosen, key=lambda each: _offloaded in each):
        yield taken(config, each)


def taken(config: TrainConfig, chosen: Sequence[Way]) -> Lighter:
    result = Lighter(config)
    for way in chosen:
        result = way(result)
    return result


def on_more_gpus(config: TrainConfig, *, ranks: int, device: torch.device) -> str:
    """What is to be said to a single GPU."""
    one = ranks == 1 and device.type == "cuda" and not config.run.fp8
    return "start it on several GPUs with --shard full, which divides weights and optimizer state, or " if one else ""


def _size(config: TrainConfig, ranks: int) -> int:
    assert config.ranks.shard != "none"
    return check_shard(config.ranks.shard, ranks, elastic=True)


def _sharded(before: Lighter) -> Lighter:
    config, ranks = before.config, before.config.ranks
    return Lighter(replace(config, ranks=replace(ranks, shard="full")), (*before.flags, "--shard full"))


def _recomputed(before: Lighter) -> Lighter:
    run = replace(before.config.run, activation_checkpointing="block")
    return Lighter(replace(before.config, run=run), (*before.flags, "--activation_checkpointing block"))


def _offloaded(before: Lighter) -> Lighter:
    if before.config.ranks.shard == "none":  # which it needs, also on a single GPU
        before = _sharded(before)
    run = replace(before.config.run, offload="optimizer")
    return Lighter(replace(before.config, run=run), (*before.flags, "--offload optimizer"))
