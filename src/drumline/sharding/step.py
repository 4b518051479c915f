"""A step of a sharded model: made of the same parts as any other, with the strategy that sums by parts."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drumline.config import TrainConfig
from drumline.data import Batches, BatchPlan
from drumline.errors import ConfigError
from drumline.model import GPT, token_objective
from drumline.optim import make_optimizer
from drumline.parallel import World, allow_tf32, pick_dtype
from drumline.sharding.mesh import check_shard, make_mesh, may_lose_hosts, size_of_groups
from drumline.sharding.strategy import Dealt, Sharded, ShardedBitwise
from drumline.sharding.wrapping import How
from drumline.train import Backward, Precision, Step

if TYPE_CHECKING:
    from drumline.parallel import Stopwatch


class ShardedBackward(Backward):
    """Lets the strategy repeat the last micro-batch where other ranks have one more."""

    def __init__(self, plain: Backward, strategy: Sharded) -> None:
        super().__init__(plain.objective, plain.precision, plain.weight, plain.scale)
        self._strategy = strategy

    def __call__(self, model: nn.Module, batch: Any, watch: Stopwatch | None = None) -> Tensor:
        self._strategy.now.watch = watch
        loss = super().__call__(model, batch, watch)
        self._strategy.now.watch = None
        self._strategy.in_vain = lambda: super(ShardedBackward, self).__call__(model, batch)
        return loss


def sharded_step(config: TrainConfig, model: nn.Module, batches: Batches, world: World) -> Step:
    """The step of a run with --shard. model: on the CPU, from where each part goes to its rank"""
    elastic, lines = may_lose_hosts(world, hosts=config.ranks.hosts), list[str]()
    world.on_all_ranks(lambda: check_sharding(config, ranks=world.size, device=world.device, elastic=elastic))
    size = size_of_groups(config.ranks.shard, world, elastic=elastic, say=lines.append)
    allow_tf32()
    precision = Precision.of(world.device, pick_dtype(config.run.dtype, world.device))
    if config.run.compile:
        model.compile()
    bitwise = config.ranks.bitwise
    how = How(make_mesh(size, world), precision.dtype, config.run.offload == "optimizer", bitwise)
    batches.plan = dealt(batches.plan, bitwise=bitwise)
    strategy = (ShardedBitwise if bitwise else Sharded)(model, batches.plan, world, how)
    strategy.notes = lines
    backward = Backward(token_objective, precision, batches.plan.sequences * batches.tokens_per_item)
    optimizer = make_optimizer(model, config.optim, exact=bitwise)
    fix = "use an elementwise one, such as torch.optim.AdamW, or --optimizer muon, which gathers its matrices"
    world.on_all_ranks(lambda: check_optimizer(optimizer, fix=fix))
    sharded = ShardedBackward(backward, strategy)
    return Step(model, optimizer, strategy, sharded, precision, config.optim.grad_clip or 0.0)


def check_sharding(config: TrainConfig, *, ranks: int, device: torch.device, elastic: bool) -> None:
    """Refuse what does not work with parts of weights. elastic: see `check_shard`"""
    if config.ranks.shard == "none":
        if config.run.offload == "none":
            return
        raise ConfigError(
            f"--offload {config.run.offload} moves the parts of a sharded run, and this one is not sharded",
            fix="add --shard full, also for a single GPU",
        )
    check_shard(config.ranks.shard, ranks, elastic=elastic)
    if pick_dtype(config.run.dtype, device) == torch.float16:
        raise ConfigError(
            "a sharded model cannot be trained in float16, whose gradients are scaled",
            fix="use --dtype bfloat16, or --shard none",
        )


def check_optimizer(optimizer: torch.optim.Optimizer, *, fix: str) -> None:
    """Refuse one of torch's whose update of a number depends on numbers that other ranks have."""
    for name in ("Muon", "Adafactor"):
        if isinstance(optimizer, getattr(torch.optim, name, ())):  # older versions of torch lack them
            raise ConfigError(
                f"torch.optim.{name} mixes the rows of a weight, which sharding gives to different ranks", fix=fix
            )


def dealt(plan: BatchPlan, *, bitwise: bool) -> BatchPlan:
    """Which micro-batches a rank computes; with --bitwise that makes no difference to the sum."""
    return Dealt(plan.micro_batch_size, plan.micro_batches) if bitwise else plan


def kernels_in_use(config: TrainConfig, step: Step) -> str:
    """What of drumline's kernels a sharded step uses, in words."""
    model, optimizer, used = step.model, step.optimizer, list[str]()
    if step.precision.device.type == "cuda" and importlib.util.find_spec("triton"):
        bf16 = step.precision.dtype == torch.bfloat16
        own = type(optimizer) is not torch.optim.AdamW and getattr(optimizer, "_step_supports_amp_scaling", False)
        parts = {"loss": bf16 and isinstance(model, GPT), "embeddings": bf16 and hasattr(model, "is_fused")}
        used = [name for name, is_used in {**parts, "optimizer": own}.items() if is_used]
    kernels = f"Triton kernels for {' and '.join(used)}" if used else "no Triton kernels"
    loss = "loss without whole logits; " if isinstance(model, GPT) else ""
    asked = f"shard  {config.ranks.shard}: {loss}{kernels}; no kernels for whole models, no CUDA graphs"
    return "\n".join([*getattr(step.strategy, "notes", []), asked])
