"""What of a model is gathered together: each repeated block, an untied embedding, the output head, and all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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


def gathered_apart(model: nn.Module, units: Sequence[nn.Module] | None = None) -> list[nn.Module]:
    """The modules whose weights are gathered one after another; None: the largest repeated block.

    Refuses a model that cannot be divided so.
    """
    if units is None and isinstance(model, GPT):
        chosen = [*model.blocks, *_called_tables(model)]
    else:
        chosen = [*(repeated_blocks(model) if units is None else units)]
    _refuse_shared(model, chosen)
    _refuse_mixed(model, chosen)
    return chosen


def shard(model: nn.Module, how: How, now: Round, *, units: Sequence[nn.Module]) -> list[InTree]:
    """Spread a model's weights over the mesh, in place; returns the trees of --bitwise. units: of `gathered_apart`"""
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if how.offloads else OffloadPolicy()
    # With --bitwise, autocast rounds weights as it does without sharding. What is looked up is float32 either way.
    low = torch.bfloat16 if how.dtype == torch.bfloat16 and not how.bitwise else None
    rounded = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(None, torch.float32, cast_forward_inputs=False)
    for module in units:
        policy = exact if isinstance(module, nn.Embedding) else rounded
        fully_shard(module, mesh=how.mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(model, mesh=how.mesh, mp_policy=exact, offload_policy=offload, reshard_after_forward=False)
    if any(parameter.is_meta for parameter in model.parameters()):
        own = "cpu" if how.offloads else how.mesh.device_type
        model._apply(lambda tensor: torch.empty_like(tensor, device=own) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    model.register_forward_hook(_reshard_after_reading)
    return [tree for part in [*units, model] if (tree := _communicate(cast(FSDPModule, part), how, now))]


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
            and not isinstance(children[0], nn.ModuleList | nn.ModuleDict)  # which are not called
        ):
            size = sum(p.numel() for p in module.parameters())
            if size > most:
                most, blocks = size, children
    return blocks


def named_units(model: nn.Module, names: str | Iterable[str]) -> list[nn.Module]:
    """The modules of these names; a list of modules stands for each of them."""
    known, units = dict(model.named_modules()), dict[str, nn.Module]()
    for name in [names] if isinstance(names, str) else names:
        if name not in known or not name:
            some = ", ".join([each for each in known if each][:8])
            raise ConfigError(f"the model has no module {name!r} for shard_units", fix=f"use names like {some}")
        for place, module in _inside_lists(name, known[name]):
            for other, unit in units.items():
                if any(module is each for each in unit.modules()) or any(unit is each for each in module.modules()):
                    problem = f"shard_units has {place} twice"
                    if module is not unit:
                        problem = f"shard_units has both {other} and {place}, one of which is inside of the other"
                    raise ConfigError(problem, fix="name each module once, without what is inside of it")
            units[place] = module
    return [*units.values()]


def _inside_lists(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What is called, by name: lists of modules are not."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield name, module
        return
    for child, inside in module.named_children():
        yield from _inside_lists(f"{name}.{child}", inside)


def _refuse_shared(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """A weight is gathered once, so two units cannot share one."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, nn.Module] = {}
    outside = {id(m): m for m in model.modules()}
    for unit in units:
        for parameter in unit.parameters():
            if owners.setdefault(id(parameter), unit) is not unit:
                raise _shared(names[id(parameter)], unit)
        for module in unit.modules():
            outside.pop(id(module), None)
    for module in outside.values():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in owners:
                raise _shared(names[id(parameter)], owners[id(parameter)])
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ConfigError(
                f"the model has a weight without a dimension, {name}, which cannot be divided",
                fix="give it a shape of (1,), or train without sharding",
            )


def _shared(name: str, unit: nn.Module) -> ConfigError:
    return ConfigError(
        f"the weight {name} is used in several places, one of them in a {type(unit).__name__} that is sharded apart",
        fix="name other modules in shard_units, without those that share weights",
    )


def _refuse_mixed(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """The gradients of a unit are summed together, in one dtype."""
    names = {id(p): name for name, p in model.named_parameters()}
    apart = {id(p) for unit in units for p in unit.parameters()}
    rest = [p for p in model.parameters() if id(p) not in apart]
    for together in [*(list(unit.parameters()) for unit in units), rest]:
        trained = [p for p in together if p.requires_grad]
        for each in trained:
            if each.dtype != trained[0].dtype:
                (name, dtype), (other, usual) = ((names[id(p)], str(p.dtype)) for p in (each, trained[0]))
                raise ConfigError(
                    f"{name} is {dtype.removeprefix('torch.')}, and {other}, which is gathered together with it, is "
                    + usual.removeprefix("torch."),
                    fix="give them one dtype, as model.float() does; Trainer's dtype is what is computed in",
                )
