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
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    parts = found if isinstance(found, tuple | list) else [found]
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


def usual_loss(model: nn.Module, sample: Any) -> Loss | None:
    """For (input, target) samples and a model that takes only the input: cross entropy for classes, else squared error.

    None: the model computes its own loss.
    """
    if not isinstance(sample, tuple | list) or len(sample) != 2 or takes_two(model):
        return None
    target = sample[1]
    is_class = isinstance(target, int) or (isinstance(target, Tensor) and not target.is_floating_point())
    return F.cross_entropy if is_class else F.mse_loss


def takes_two(model: nn.Module) -> bool:
    """Whether a model accepts the target as a second argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters) or (
        len([p for p in parameters if p.kind in kinds]) >= 2
    )
