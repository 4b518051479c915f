"""The weights of a sharded model, used by something else than a step: by all ranks at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

T = TypeVar("T")


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "unshard")


def inside(model: nn.Module, function: Callable[[], T]) -> T:
    """Call it as if it were the forward of a sharded model, whose methods find their weights gathered; no gradients.

    All ranks call it, with functions that call the same parts of the model in the same order.
    """
    model.forward = function
    try:
        found: T = model()
    finally:
        del model.forward
    return found
