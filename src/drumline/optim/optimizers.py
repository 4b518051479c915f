"""Parameter groups, optimizers, and the learning rate as a function of the step.

Settings that are None in an OptimConfig default to the classic recipe here; `presets.with_preset` resolves them first.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drumline.config import OPTIMIZERS, RECIPES, OptimConfig, filled
from drumline.model import CausalSelfAttention

T = TypeVar("T")


def learning_rate(step: int, optim: OptimConfig, *, total_steps: int) -> float:
    """Linear warmup to `optim.lr`, then the schedule; `step` counts from 0."""
    optim = filled(optim, RECIPES["classic"])
    peak, low = _known(optim.lr), _known(optim.min_lr_ratio)
    warmup = warmup_steps(optim, total_steps=total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "wsd":
        decay_steps = max(1, round(_known(optim.decay_fraction) * total_steps))
        progress = min(1.0, max(0.0, (step - (total_steps - decay_steps)) / decay_steps))
        return peak * (1.0 - (1.0 - low) * progress)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def scaled(optim: OptimConfig, *, sequences: int) -> OptimConfig:
    """With the learning rates scaled to a batch of `sequences`, if scale_lr is set."""
    if optim.scale_lr == "none" or optim.lr is None or optim.base_batch_size is None:
        return optim
    ratio = sequences / optim.base_batch_size
    return replace(optim, lr=optim.lr * (ratio if optim.scale_lr == "linear" else math.sqrt(ratio)))


def warmup_steps(optim: OptimConfig, *, total_steps: int) -> int:
    return total_steps // 50 if optim.warmup_steps is None else optim.warmup_steps


def make_optimizer(model: nn.Module, optim: OptimConfig, *, exact: bool = False) -> torch.optim.Optimizer:
    """AdamW for all weights; Muon for matrices and AdamW for the rest; or a custom optimizer.

    A group's learning rate is the schedule, which peaks at `optim.lr`, times the group's "lr_ratio".
    exact: parts of a weight are updated like the whole of it, bit by bit
    """
    if optim.optimizer is not None and optim.optimizer not in OPTIMIZERS:
        from drumline.optim.plugin import plugin_optimizer

        return plugin_optimizer(optim.optimizer, model, optim)
    optim = filled(optim, RECIPES["classic"])
    lr, decay = _known(optim.lr), _known(optim.weight_decay)
    rates = {"matrices": lr, "embeddings": optim.embedding_lr or lr, "head": optim.head_lr or lr}
    kinds = parameters_by_kind(model)
    matrices = kinds.pop("matrices") if optim.optimizer == "muon" else []
    groups: list[dict[str, Any]] = []
    for kind, parameters in kinds.items():
        rate = rates.get(kind, rates["head"])
        decayed = 0.0 if kind == "vectors" else decay
        groups.append({"params": parameters, "lr": rate, "lr_ratio": rate / lr, "weight_decay": decayed})
    kind_of_adamw = torch.optim.AdamW
    if exact or all(p.is_cuda for p in model.parameters()):
        from drumline.optim.suited import adamw_for

        kind_of_adamw = adamw_for(model, exact=exact)
    adamw = kind_of_adamw(
        [group for group in groups if group["params"]] or [{"params": []}],
        lr=lr,
        betas=(_known(optim.beta1), _known(optim.beta2)),
        eps=_known(optim.eps),
        fused=all(p.device.type in ("cpu", "cuda") for p in model.parameters()),
    )
    if not matrices:
        return adamw
    from drumline.optim.muon import Muon

    # Queries, keys and values are three matrices stacked in one parameter.
    row_parts = {part.qkv.weight: part.row_parts for part in model.modules() if isinstance(part, CausalSelfAttention)}
    return Muon(matrices, adamw, lr=lr, momentum=_known(optim.momentum), weight_decay=decay, row_parts=row_parts)


def parameters_by_kind(model: nn.Module) -> dict[str, list[Tensor]]:
    """The trained weights: matrices, embeddings, head (output projection), vectors (norms, biases), others.

    The output projection is the model's `head_weight`, even if it is tied to an embedding. In a model without that
    attribute, it is a matrix like the others.
    """
    output = getattr(model, "head_weight", None)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds: dict[str, list[Tensor]] = {name: [] for name in ("matrices", "embeddings", "head", "others", "vectors")}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter is output:
            kinds["head"].append(parameter)
        elif id(parameter) in tables:
            kinds["embeddings"].append(parameter)
        else:
            by_dimensions = {0: "vectors", 1: "vectors", 2: "matrices"}
            kinds[by_dimensions.get(parameter.dim(), "others")].append(parameter)
    return kinds


def _known(value: T | None) -> T:
    """A setting that must be resolved."""
    assert value is not None
    return value
