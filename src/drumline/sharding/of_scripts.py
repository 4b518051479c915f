"""A step of the model and the optimizer that a script has made, sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from drumline.data import BatchPlan
from drumline.errors import ConfigError
from drumline.parallel import World
from drumline.report import to_stderr
from drumline.sharding.mesh import Shard, check_shard, make_mesh, may_lose_hosts, size_of_groups
from drumline.sharding.step import ShardedBackward, check_optimizer
from drumline.sharding.strategy import Sharded, ShardedBitwise
from drumline.sharding.wrapping import How, named_units
from drumline.train import Backward, Objective, Precision, Step


def script_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    plan: BatchPlan,
    world: World,
    *,
    shard: Shard,
    units: str | Sequence[str],
    precision: Precision,
    bitwise: bool,
    grad_clip: float,
) -> Step:
    """The weights are those of rank 0's model. units: names of modules; none: the largest repeated block"""
    elastic, lines = may_lose_hosts(world), list[str]()
    world.on_all_ranks(lambda: _check(optimizer, precision, shard, world, elastic=elastic))
    named = world.on_all_ranks(lambda: named_units(model, units) if units else None)
    size = size_of_groups(shard, world, elastic=elastic, say=lines.append)
    if lines and world.is_rank0:
        to_stderr(lines[0])
    _share(model, world)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    how = How(make_mesh(size, world), precision.dtype, bitwise=bitwise)
    kind = ShardedBitwise if bitwise else Sharded
    strategy = kind(model, plan, world, how, units=named)
    divided = dict(model.named_parameters())
    for group in optimizer.param_groups:  # the optimizer was made for the whole weights
        group["params"] = [divided[names[id(each)]] if id(each) in names else each for each in group["params"]]
    backward = ShardedBackward(Backward(objective, precision, plan.sequences, strategy.scale), strategy)
    return Step(model, optimizer, strategy, backward, precision, grad_clip)


def _check(
    optimizer: torch.optim.Optimizer, precision: Precision, shard: Shard, world: World, *, elastic: bool
) -> None:
    check_shard(shard, world.size, elastic=elastic)
    if precision.dtype == torch.float16:
        raise ConfigError(
            "a sharded model cannot be trained in float16, whose gradients are scaled",
            fix='use dtype="bfloat16", or shard="none"',
        )
    check_optimizer(
        optimizer,
        fix="use an elementwise optimizer, such as torch.optim.AdamW, or drumline train --optimizer muon",
    )
    if optimizer.state:
        raise ConfigError(
            "the optimizer has made steps already, with the whole weights that sharding replaces",
            fix="give Trainer a new optimizer, or leave shard out",
        )


def _share(model: nn.Module, world: World) -> None:
    """Ranks may have drawn other weights; one tensor at a time is on the GPU."""
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            there = tensor.detach().to(world.device)
            world.broadcast([there])
            if there.data_ptr() != tensor.data_ptr():
                tensor.copy_(there)
