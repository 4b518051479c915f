"""One optimizer step: micro-batches in, updated weights and numbers out. No I/O.

`Backward` is forward and backward of a micro-batch, a `parallel.Strategy` adds gradients up, `Step` is the whole. The
loop, the benchmarks and the tests all run this one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from drumline.lazy import room
from drumline.parallel import waiting_for

if TYPE_CHECKING:
    from drumline.parallel import Stopwatch, Strategy

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

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Wrap forward only; autograd reuses these dtypes in backward."""
        with contextlib.ExitStack() as contexts:
            if self.dtype != torch.float32:
                contexts.enter_context(torch.autocast(self.device.type, dtype=self.dtype))
            if self.device.type == "cuda":
                contexts.enter_context(room("kernels").fastest_attention(self.device))
            yield


@dataclass
class Backward:
    """Forward and backward of one micro-batch."""

    objective: Objective
    precision: Precision
    weight: int
    """What the whole step counts: its tokens, or its samples."""
    scale: int = 1
    """As Strategy.scale."""
    runs_ahead: ClassVar[bool] = False
    """Whether a step's gradient is to be started before the numbers of the step before it are read."""

    def __call__(self, model: nn.Module, batch: Any, watch: Stopwatch | None = None) -> Tensor:
        """The micro-batch's share of the step's loss, float32 (), after backward has run."""
        loss = self.loss(model, to_device(batch, self.precision.device))
        scaled = self.precision.scaler.scale(loss * self.scale)
        if watch is not None:
            watch.watch(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Forward alone; the batch is on the device."""
        with self.precision.autocast():
            return self.objective(model, batch) / self.weight


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
    work_s: tuple[float, ...] = ()
    """What each rank's own work took, if it was measured; every rank sees the same."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of a step is in every parameter's .grad; this is what came with it."""

    totals: Tensor
    """As Strategy.finish gives them: loss, votes to stop and to save, each rank's time."""
    own_loss: Tensor


@dataclass
class Step:
    """What one optimizer step computes, in two halves: the gradient, and the update by it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    backward: Backward
    precision: Precision
    grad_clip: float = 0.0
    """Largest norm of the gradient; 0: as it is."""

    def gradient(
        self, micro_batches: Iterable[Any], *, stop: bool = False, save: bool = False, watch: Stopwatch | None = None
    ) -> Gradient:
        """Add up the gradient over this rank's micro-batches and over the ranks, with what each votes for."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, batch in enumerate(micro_batches):
            with self.strategy.micro_batch(number):
                losses.append(self.backward(self.strategy.model, batch, watch))
            self.strategy.add(losses[-1])
        # Made on the device: a copy from the host would wait until backward has ended, then the device for the host.
        extras = [losses[0].new_full((1,), float(vote)) for vote in (stop, save)]
        totals = self.strategy.finish(torch.cat(extras if watch is None else [*extras, watch.slots(losses[0])]))
        self.precision.scaler.unscale_(self.optimizer)
        return Gradient(totals, torch.stack(losses).sum())

    def update(self, gradient: Gradient, *, lr: float | None) -> Callable[[], StepResult]:
        """Clip and update. The result waits for the step's numbers, but not for what the device is given next.

        lr: of this step, times each group's own "lr_ratio"; None leaves the optimizer's alone
        """
        scaler, optimizer = self.precision.scaler, self.optimizer
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        numbers = torch.cat((gradient.totals, gradient.own_loss.reshape(1), norm.reshape(1).float()))
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("lr_ratio", 1.0)
        if _may_update_unread(numbers, optimizer) and not scaler.is_enabled():
            read = room("kernels").update_unread(optimizer, numbers, norm, grad_clip=self.grad_clip)
            return lambda: _result(read())
        with waiting_for("the sums of gradients and losses on its device"):
            result = _result(numbers.tolist())
        if result.updated and 0.0 < self.grad_clip < result.grad_norm:
            torch._foreach_mul_(gradients, self.grad_clip / result.grad_norm)
        if result.updated:
            scaler.step(optimizer)
        scaler.update()
        return lambda: result


def _may_update_unread(numbers: Tensor, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the device can go on to the update while the host waits for the numbers; a CPU is the host."""
    return numbers.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False)


def _result(numbers: list[float]) -> StepResult:
    mean_loss, stop, save, *work_s, own_loss, grad_norm = numbers
    return StepResult(
        mean_loss,
        grad_norm,
        updated=math.isfinite(mean_loss) and math.isfinite(grad_norm),
        own_loss=own_loss,
        stop=stop > 0,
        save=save > 0,
        work_s=tuple(work_s),
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of nested tuples, lists and dicts with every tensor on the device."""
    if isinstance(batch, Tensor):
        # Only from pinned memory is a copy to a GPU not waited for.
        pinned = batch.pin_memory() if device.type == "cuda" and not batch.is_cuda else batch
        return pinned.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
