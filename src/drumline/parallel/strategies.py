"""Strategies: how the gradients of a step's micro-batches, from this and other ranks, become one gradient.

The step calls `model`, runs each backward inside `micro_batch`, adds each loss, and `finish` leaves the gradient of the
whole step in `parameter.grad`, the same on every rank. `Plain` is for one process; `ddp.Ddp` lets torch reduce
gradients during backward; `bitwise.Bitwise` sums them in a fixed tree, so that the result is bitwise identical on any
number of ranks. To add another one, write a class with these methods and choose it in `make_strategy`.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from drumline.data import BatchPlan
from drumline.parallel.world import World


class Strategy(Protocol):
    model: nn.Module
    """What the step calls: the model itself, or a wrapper that reduces gradients in backward."""
    scale: int
    """Every loss is multiplied by this before backward, because the strategy divides by it."""

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Context of forward and backward of the `number`-th micro-batch of this rank."""

    def add(self, loss: Tensor) -> None:
        """A micro-batch's backward is done; its loss is this part of the step's: float32 ()."""

    def finish(self, extras: Tensor) -> Tensor:
        """Leave the whole step's gradient in every parameter's .grad.

        extras: float32 (n,), to be summed over the ranks; sent along with the loss, so they cost no extra message
        returns: float32 (1 + n,), the same on every rank: the whole step's loss, then the sums
        """

    def norm(self, gradients: Any, /) -> Tensor:
        """Of the whole gradient, of which these are the parts, after `finish`: ()."""


def make_strategy(model: nn.Module, plan: BatchPlan, world: World, *, bitwise: bool) -> Strategy:
    if bitwise:
        from drumline.parallel.bitwise import Bitwise

        return Bitwise(model, plan, world)
    if world.is_group:
        from drumline.parallel.ddp import Ddp

        return Ddp(model, plan, world)
    return Plain(model)


class Plain:
    """One process: backward accumulates gradients by itself."""

    scale = 1

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._losses: list[Tensor] = []

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        if number == 0:  # discard what an interrupted step left
            self._losses = []
        return contextlib.nullcontext()

    def add(self, loss: Tensor) -> None:
        self._losses.append(loss)

    def finish(self, extras: Tensor) -> Tensor:
        return torch.cat((torch.stack(self._losses).sum().reshape(1), extras))

    norm = staticmethod(torch.nn.utils.get_total_norm)
