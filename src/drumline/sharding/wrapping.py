"""What of a model is gathered together: each repeated block, an untied embedding, the output head, and all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from drumline.errors import ConfigError
from drumline.model import GPT
from drumline.sharding.collectives import Gathered, InTree, Round, Summed
from drumline.sharding.mesh import SHARD


@dataclass(frozen=True)
class How:
    """How a model is sharded."""

    mesh: DeviceMesh
    dtype: torch.dtype = torch.float32
    """Of the gathered weights of a unit, and of what is computed with them; parts of ranks are float32."""
    offloads: bool = False
    bitwise: bool = False

    @property
    def replicas(self) -> int:
        return self.mesh.size() // self.mesh[SHARD].size()


def shard(model: nn.Module, how: How, now: Round, *, units: Sequence[nn.Module] | None = None) -> list[InTree]:
    """Spread a model's weights over the mesh, in place; returns the trees of --bitwise.

    units: the modules whose weights are gathered one after another; None: the largest repeated block
    """
    tables: list[nn.Module] = []
    if units is None and isinstance(model, GPT):
        units, tables = [*model.blocks], _called_tables(model)
    chosen = [*(repeated_blocks(model) if units is None else units), *tables]
    _refuse_shared(model, chosen)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if how.offloads else OffloadPolicy()
    # With --bitwise, autocast rounds weights as it does without sharding. What is looked up is float32 either way.
    low = torch.bfloat16 if how.dtype == torch.bfloat16 and not how.bitwise else None
    rounded = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
    for module in chosen:
        policy = exact if isinstance(module, nn.Embedding) else rounded
        fully_shard(module, mesh=how.mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=how.mesh, mp_policy=exact, offload_policy=offload, reshard_after_forward=False)
    if any(parameter.is_meta for parameter in model.parameters()):
        own = "cpu" if how.offloads else how.mesh.device_type
        model._apply(lambda tensor: torch.empty_like(tensor, device=own) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    model.register_forward_hook(_reshard_after_reading)
    return [tree for part in [*chosen, model] if (tree := _communicate(cast(FSDPModule, part), how, now))]


def _communicate(part: FSDPModule, how: How, now: Round) -> InTree | None:
    tree = InTree(now, replicas=how.replicas) if how.bitwise else None
    part.set_custom_all_gather(cast(Any, Gathered(now)))
    part.set_custom_reduce_scatter(cast(Any, tree or Summed(now)))
    if how.mesh.size() > 1:  # a single rank neither sums nor divides
        part.set_gradient_divide_factor(1.0)  # losses are already parts of the whole step
        part.set_force_sum_reduction_for_comms(True)  # else it is multiplied within the sum, which gloo cannot
    return tree


def _reshard_after_reading(model: nn.Module, args: Any, output: Any) -> None:
    """Without a backward that follows, the weights outside of the blocks would stay whole."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, model).reshard()


def _called_tables(model: GPT) -> list[nn.Module]:
    """Embedding and head of a GPT, if they are not tied, as modules that are called: torch gathers weights at calls.

    Neither needs its weights in backward: the gradient of a lookup has none, and the loss computes its own in forward.
    """
    if model.head is None:
        return []
    _inside(model.token_embedding, model, "embedded")
    _inside(model.head, model, "summed_loss")
    _inside(model.head, model, "logits")
    return [model.token_embedding, model.head]


def _inside(module: nn.Module, model: nn.Module, name: str) -> None:
    """Let a method of the model run in the forward of a module."""
    method = getattr(model, name)

    def forward(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return function(*arguments)

    module.forward = forward
    setattr(model, name, lambda *arguments: module(method, *arguments))


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children of the list with the most weights, of those whose children are all of one class."""
    most, blocks = 0, list[nn.Module]()
    for module in model.modules():
        children = list(module.children())
        if (
            isinstance(module, nn.ModuleList | nn.Sequential)
            and len(children) > 1
            and len(set(map(type, children))) == 1
        ):
            size = sum(p.numel() for p in module.parameters())
            if size > most:
                most, blocks = size, children
    return blocks


def named_units(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules of these names; a list of modules stands for each of them."""
    known, units = dict(model.named_modules()), list[nn.Module]()
    for name in names:
        if name not in known or not name:
            some = ", ".join([each for each in known if each][:8])
            raise ConfigError(f"the model has no module {name!r} for shard_units", fix=f"use names like {some}")
        module = known[name]
        units += module.children() if isinstance(module, nn.ModuleList | nn.ModuleDict) else [module]
    return units


def _refuse_shared(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """A weight is gathered once, so two units cannot share one."""
    inside = {id(p): unit for unit in units for p in unit.parameters()}
    modules = {id(m) for unit in units for m in unit.modules()}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            unit = inside.get(id(parameter))
            if unit is not None and (id(module) not in modules or not any(p is parameter for p in unit.parameters())):
                raise ConfigError(
                    f"a weight of {name or 'the model'} also belongs to a {type(unit).__name__} that is sharded apart",
                    fix="name other modules in shard_units, without those that share weights",
                )
            if not parameter.dim():
                raise ConfigError(
                    f"the model has a weight without a dimension, in {name or 'itself'}, which cannot be divided",
                    fix="give it a shape of (1,), or train without sharding",
                )
