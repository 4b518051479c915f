"""One optimizer step: micro-batches in, updated weights and numbers out. No I/O."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumline.parallel import Strategy

Objective = Callable[[nn.Module, Any], Tensor]
"""(model, micro-batch on the device) -> the loss SUMMED over what counts in it: tokens, or samples."""


@dataclass(frozen=True)
class Precision:
    """The number format of matrix products, and float16's loss scaler."""

    device: torch.device
    dtype: torch.dtype
    scaler: torch.amp.GradScaler

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Precision:
        return cls(device, dtype, torch.amp.GradScaler(device.type, enabled=dtype == torch.float16))

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over everything that counts in the step, before the update."""
    grad_norm: float
    """Of the whole gradient, before clipping."""
    updated: bool
    """False: the loss or the gradient was not finite, and the weights are as before."""
    own_loss: float
    """This rank's share of the loss: where the loss is not finite, it tells whose it was."""
    stop: bool
    """Whether any rank was asked to stop; every rank sees the same."""
    save: bool
    """Whether any rank wants a checkpoint of this step; every rank sees the same."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Any],
    objective: Objective,
    strategy: Strategy,
    *,
    weight: int,
    precision: Precision,
    lr: float | None,
    grad_clip: float,
    vote_to_stop: bool = False,
    vote_to_save: bool = False,
) -> StepResult:
    """Add up the gradient over the micro-batches, each divided by `weight`, what the whole step counts; update once."""
    scaler = precision.scaler
    own: list[Tensor] = []

    def backward(wrapped: nn.Module, batch: Any) -> Tensor:
        with precision.autocast():
            loss = objective(wrapped, to_device(batch, precision.device)) / weight
        scaler.scale(loss * strategy.scale).backward()  # type: ignore[no-untyped-call]
        own.append(loss.detach().float())
        return own[-1]

    optimizer.zero_grad(set_to_none=True)
    totals = strategy.accumulate(micro_batches, backward, votes=(vote_to_stop, vote_to_save))
    scaler.unscale_(optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    numbers = torch.cat((totals, torch.stack(own).sum().reshape(1), norm.reshape(1).float()))
    mean_loss, stop, save, own_loss, grad_norm = numbers.tolist()
    finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    if finite and 0.0 < grad_clip < grad_norm:
        torch._foreach_mul_(gradients, grad_clip / grad_norm)
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    if finite:
        scaler.step(optimizer)
    scaler.update()
    return StepResult(mean_loss, grad_norm, updated=finite, own_loss=own_loss, stop=stop > 0, save=save > 0)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of nested tuples, lists and dicts with every tensor on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
