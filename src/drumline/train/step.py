"""One optimizer step: micro-batches in, updated weights and metrics out. No I/O.

`Backward` is forward and backward of a micro-batch, a `parallel.Strategy` sums the gradients, `Step` is the whole. The
loop, the benchmarks and the tests all run this one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from drumline.lazy import room
from drumline.parallel import own_pulse, waiting_for

if TYPE_CHECKING:
    from drumline.parallel import Stopwatch, Strategy

Objective = Callable[[nn.Module, Any], Tensor]
"""(model, micro-batch on the device) -> the loss SUMMED over its tokens, or samples."""


@dataclass(frozen=True)
class Precision:
    """Autocast dtype, and float16's loss scaler."""

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
    """Number of tokens, or samples, in the whole step."""
    scale: int = 1
    """As Strategy.scale."""
    runs_ahead: ClassVar[bool] = False
    """Whether the next step's gradient may be started before the metrics of this step are read."""

    def __call__(self, model: nn.Module, batch: Any, watch: Stopwatch | None = None) -> Tensor:
        """The micro-batch's part of the step's loss, float32 (), after backward."""
        loss = self.loss(model, to_device(batch, self.precision.device))
        scaled = self.precision.scaler.scale(loss * self.scale)
        if watch is not None:
            watch.watch(scaled)
        own_pulse().clock.enter("backward")
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Forward only; the batch is on the device."""
        with self.precision.autocast():
            return self.objective(model, batch) / self.weight


class Votes(NamedTuple):
    """What a rank wants all ranks to do after a step."""

    stop: bool = False
    save: bool = False
    snapshot: bool = False


NO_VOTES = Votes()


@dataclass(frozen=True)
class StepResult:
    loss: float
    """Mean over all tokens or samples of the step, before the update."""
    grad_norm: float
    """Of the whole gradient, before clipping."""
    updated: bool
    """False: the loss or the gradient had NaN or Inf, and the weights are unchanged."""
    own_loss: float
    """This rank's part of the loss, to find out where a NaN came from."""
    votes: Votes
    """What any rank wants; the same on all ranks."""
    work_s: tuple[float, ...] = ()
    """Seconds of each rank's own work, if measured, then its lap, if there is one; the same on all ranks."""
    more: tuple[tuple[str, float], ...] = ()
    """What else a record of the step has."""


@dataclass(frozen=True)
class Gradient:
    """What comes with the gradient of a step, which is in every parameter's .grad."""

    totals: Tensor
    """From Strategy.finish: loss, the votes, each rank's time."""
    own_loss: Tensor


@dataclass
class Step:
    """One optimizer step, in two halves: gradient and update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    backward: Backward
    precision: Precision
    grad_clip: float = 0.0
    """Maximum gradient norm; 0: no clipping."""

    def gradient(
        self, micro_batches: Iterable[Any], *, votes: Votes = NO_VOTES, watch: Stopwatch | None = None
    ) -> Gradient:
        """Sum the gradient over this rank's micro-batches and over the ranks, along with the votes."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, batch in enumerate(micro_batches):
            with self.strategy.micro_batch(number):
                losses.append(self.backward(self.strategy.model, batch, watch))
            self.strategy.add(losses[-1])
        # Created on the device: a copy from the host would wait for backward, and then the device for the host.
        extras = [losses[0].new_full((1,), float(vote)) for vote in votes]
        totals = self.strategy.finish(torch.cat(extras if watch is None else [*extras, watch.slots(losses[0])]))
        self.precision.scaler.unscale_(self.optimizer)
        return Gradient(totals, torch.stack(losses).sum())

    def update(self, gradient: Gradient, *, lr: float | None) -> Callable[[], StepResult]:
        """Clip and update. The result waits for the step's metrics, but not for work queued on the device later.

        lr: of this step, times each group's "lr_ratio"; None: leave the optimizer's own
        """
        own_pulse().clock.enter("optimizer")
        scaler, optimizer = self.precision.scaler, self.optimizer
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = self.strategy.norm(gradients)
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
    """Whether the device can start the update while the host waits for the metrics; on a CPU it cannot."""
    return numbers.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False)


def _result(numbers: list[float]) -> StepResult:
    mean_loss, stop, save, snapshot, *work_s, own_loss, grad_norm = numbers
    updated, votes = math.isfinite(mean_loss) and math.isfinite(grad_norm), Votes(stop > 0, save > 0, snapshot > 0)
    return StepResult(mean_loss, grad_norm, updated=updated, own_loss=own_loss, votes=votes, work_s=tuple(work_s))


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of nested tuples, lists and dicts with every tensor on the device."""
    if isinstance(batch, Tensor):
        # Only copies from pinned memory to a GPU are asynchronous.
        pinned = batch.pin_memory() if device.type == "cuda" and not batch.is_cuda else batch
        return pinned.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
