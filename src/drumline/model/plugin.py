"""A custom model: made from its options, and checked before it trains."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drumline.config import GPTConfig, TrainConfig, plugin_options
from drumline.errors import ConfigError
from drumline.model.gpt import GPT
from drumline.plugins import check_call, load_plugin

_FEWEST_TOKENS = 64
_LEAST = 0.4
"""The mean loss for random targets is at least log(vocabulary), whatever the model predicts. Less than this fraction of
it is not even possible by chance: few tokens can have a probability above 1 / sqrt(vocabulary)."""


def checked_plugin(config: TrainConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that makes a custom model, and its options, checked against its signature."""
    options = plugin_options(config.model.model_options)
    make = load_plugin(config.model.model)
    check_call(config.model.model, make, "the shape", flag="model_options", options=options)
    return make, options


def plugin_model(config: TrainConfig, shape: GPTConfig) -> nn.Module:
    """A custom model with newly initialized weights."""
    make, options = checked_plugin(config)
    made: nn.Module = make(shape, **options)
    return made


def check_loss(model: nn.Module, config: TrainConfig, *, vocab_size: int) -> None:
    """Refuse a custom model whose loss is not the sum over its tokens, by what it is for random targets.

    A model that fails otherwise is left to the first step, which may give it more than this does.
    """
    name, context = config.model.model, config.model.context or 1
    if isinstance(model, GPT) or not isinstance(model, nn.Module):
        return
    _check_signature(name, model)
    shape = (-(-_FEWEST_TOKENS // context), context)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randint(vocab_size, shape, generator=generator) for _ in range(2))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()  # and without gradients: nothing that it learns or counts may change
    try:
        with torch.no_grad():
            returned = model(inputs.to(device), targets=targets.to(device))
    except Exception:
        return
    finally:
        model.train(was_training)
    _judge(name, returned, tokens=inputs.numel(), vocab_size=vocab_size)


def _check_signature(name: str, model: nn.Module) -> None:
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(each.name == "targets" or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        raise ConfigError(
            f"{name}: the forward of {type(model).__name__} does not take targets",
            fix="write it as forward(self, input_ids, targets=None) and return (logits, summed loss)",
        )


def _judge(name: str, returned: Any, *, tokens: int, vocab_size: int) -> None:
    """returned: by forward, for so many tokens and random targets"""
    fix = "return (logits, loss) from its forward, the loss as a sum: F.cross_entropy(..., reduction='sum')"
    if not isinstance(returned, tuple | list) or len(returned) < 2:
        raise ConfigError(f"{name}: forward returns {type(returned).__name__}, not a pair (logits, loss)", fix=fix)
    loss = returned[1]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"{name}: the loss that forward returns is {shape}, not a tensor with one number", fix=fix)
    if loss.item() < _LEAST * tokens * math.log(vocab_size):
        least = f"{tokens} x log({vocab_size}) = {tokens * math.log(vocab_size):.4g}"
        raise ConfigError(
            f"{name}: a loss of {loss.item():.4g} for {tokens} tokens cannot be a sum: for random targets, that is at "
            f"least {least}. Is it the mean?",
            fix=fix,
        )
