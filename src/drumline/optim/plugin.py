"""A custom optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.config import OptimConfig
from drumline.errors import ConfigError
from drumline.plugins import load_plugin

_FIX = "let it take the model and an OptimConfig and return a torch.optim.Optimizer, as CONTRIBUTING.md shows"


def checked_optimizer(value: str) -> Callable[..., Any]:
    """The function package.module:name, which must take a model and an OptimConfig."""
    make = load_plugin(value)
    try:
        inspect.signature(make).bind("the model", "the settings")
    except TypeError as error:
        raise ConfigError(f"{value} cannot be called with a model and an OptimConfig: {error}", fix=_FIX) from None
    except ValueError:
        pass  # not written in Python
    return make


def plugin_optimizer(value: str, model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    made = checked_optimizer(value)(model, optim)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f"{value} returned {type(made).__name__}, not a torch.optim.Optimizer", fix=_FIX)
    return made
