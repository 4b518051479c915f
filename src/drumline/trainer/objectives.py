"""The loss of a micro-batch of samples: by a function of (prediction, target), or by the model itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from drumline.errors import ConfigError
from drumline.train import Objective

Loss = Callable[[Any, Any], Tensor]


class Computed(NamedTuple):
    """What a model makes of a micro-batch."""

    prediction: Any
    target: Any
    """The target, or the whole micro-batch if the model computes its own loss."""
    loss: Tensor
    """Mean over the samples."""
    samples: int


def computed(loss: Loss | None, model: nn.Module, batch: Any) -> Computed:
    samples = len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
    if loss is None:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        return Computed(output, batch, own_loss(output), samples)
    if isinstance(batch, dict):
        output = model(**batch)
        return Computed(output, batch, loss(output, batch), samples)
    inputs, target = batch
    output = model(inputs)
    return Computed(output, target, loss(output, target), samples)


def own_loss(output: Any) -> Tensor:
    """The loss in a model's output: the output itself, its `loss`, or the only scalar of a tuple."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    parts = loss if isinstance(loss, tuple | list) else [loss]
    scalars = [part for part in parts if isinstance(part, Tensor) and part.numel() == 1]
    if not scalars:
        raise ConfigError(
            f"the model returns {type(output).__name__} without a loss", fix="give Trainer a loss, as loss=F.mse_loss"
        )
    return scalars[-1]


def objective_of(loss: Loss | None) -> Objective:
    """The summed loss of a micro-batch."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        result = computed(loss, model, batch)
        return result.loss * result.samples

    return objective


def usual_loss(model: nn.Module, batch: Any) -> Loss | None:
    """For (input, target) samples and a model that takes only the input: cross entropy for classes, else squared error.

    None: the model computes its own loss.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2 or takes_two(model):
        return None
    return F.mse_loss if not isinstance(batch[1], Tensor) or batch[1].is_floating_point() else F.cross_entropy


def check_batch(model: nn.Module, batch: Any, *, has_loss: bool) -> None:
    """Refuse samples that the model or the loss cannot take."""
    parameters = inspect.signature(model.forward).parameters
    if isinstance(batch, Mapping) and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        unknown = [str(name) for name in batch if name not in parameters]
        if unknown:
            raise ConfigError(
                f"the samples have {', '.join(unknown)}, but {type(model).__name__} takes {', '.join(parameters)}",
                fix="name the samples' keys like the model's arguments, or make them (input, target) pairs",
            )
    if has_loss and isinstance(batch, tuple | list) and len(batch) != 2:
        raise ConfigError(
            f"a loss is for (input, target) pairs, but the samples have {len(batch)} parts",
            fix="make them pairs, or give a collate_fn that does",
        )


def takes_two(model: nn.Module) -> bool:
    """Whether a model accepts the target as a second argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) or (
        len([p for p in parameters if p.kind in kinds]) >= 2
    )
