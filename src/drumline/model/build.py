"""The model that a config describes, and the loss it is trained by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from drumline.config import TrainConfig, gpt_config
from drumline.model.gpt import GPT
from drumline.plugins import check_call, load_plugin

_VOCAB_MULTIPLE = 64


def build_model(config: TrainConfig, *, vocab_size: int) -> nn.Module:
    """The model a config (filled in) describes, with freshly drawn weights; draw them after seeding torch."""
    padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE  # matrix products are faster on round sizes
    shape = gpt_config(config.model, vocab_size=padded)
    if config.model.model == "gpt":
        return GPT(shape)
    make, options = checked_plugin(config)
    model: nn.Module = make(shape, **options)
    return model


def checked_plugin(config: TrainConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that makes a model of the user's own, and its options, which its parameters must allow for."""
    options: dict[str, Any] = {}
    if config.model.model_options:
        from drumline.config import plugin_options

        options = plugin_options(config.model.model_options)
    make = load_plugin(config.model.model)
    check_call(config.model.model, make, "the shape", flag="model_options", options=options)
    return make, options


def token_objective(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
    """The summed cross entropy of a micro-batch of windows."""
    inputs, targets, documents = batch
    extra = {} if documents is None else {"document_ids": documents}
    loss: Tensor = model(inputs, targets=targets, **extra)[1]
    return loss


def flops_per_token(model: nn.Module, *, context: int) -> float:
    """Floating-point operations to train on one token: what the model says, else 6 for each weight of its matrices."""
    of_model = getattr(model, "flops_per_token", None)
    if of_model is not None:
        return float(of_model(context))
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return 6.0 * sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
