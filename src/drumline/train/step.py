"""One optimizer step: micro-batches in, updated weights and numbers out. No I/O."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from drumline.parallel import Stopwatch, Strategy, is_hopper, waiting_for

# On Hopper, the first that can do what is asked: cuDNN's is the fastest, and stands back where bits must repeat.
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

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
        """For forward: backward follows it of itself."""
        with contextlib.ExitStack() as held:
            if self.dtype != torch.float32:
                held.enter_context(torch.autocast(self.device.type, dtype=self.dtype))
            if is_hopper(self.device):
                held.enter_context(sdpa_kernel(_ATTENTION, set_priority=True))
            yield


class Backward:
    """Forward and backward of a step's micro-batches, one call each, and this rank's shares of the loss."""

    def __init__(
        self, objective: Objective, precision: Precision, *, weight: int, scale: int, watch: Stopwatch | None
    ) -> None:
        self._objective, self._precision, self._weight = objective, precision, weight
        self._scale, self._watch = scale, watch
        self.device = precision.device
        self.losses: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss = self.loss(model, to_device(batch, self.device))
        scaled = self._precision.scaler.scale(loss * self._scale)
        if self._watch is not None:
            self._watch.watch(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        return self.note(loss.detach().float())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A micro-batch's share of the step's loss; the batch is on the device."""
        with self._precision.autocast():
            return self._objective(model, batch) / self._weight

    def note(self, loss: Tensor) -> Tensor:
        self.losses.append(loss)
        return loss


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
    """As Strategy.accumulate gives them."""
    own_loss: Tensor


def compute_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[Any],
    objective: Objective,
    strategy: Strategy,
    *,
    weight: int,
    precision: Precision,
    vote_to_stop: bool = False,
    vote_to_save: bool = False,
    watch: Stopwatch | None = None,
) -> Gradient:
    """Add up the gradient over the micro-batches, each divided by `weight`, what the whole step counts."""
    backward = Backward(objective, precision, weight=weight, scale=strategy.scale, watch=watch)
    optimizer.zero_grad(set_to_none=True)
    totals = strategy.accumulate(micro_batches, backward, votes=(vote_to_stop, vote_to_save), watch=watch)
    precision.scaler.unscale_(optimizer)
    return Gradient(totals, torch.stack(backward.losses).sum())


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradient: Gradient,
    *,
    precision: Precision,
    lr: float | None,
    grad_clip: float,
) -> Callable[[], StepResult]:
    """Clip and update. What comes back waits for the step's numbers, but not for what the device is given next."""
    scaler = precision.scaler
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    numbers = torch.cat((gradient.totals, gradient.own_loss.reshape(1), norm.reshape(1).float()))
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("lr_ratio", 1.0)
    if getattr(optimizer, "_step_supports_amp_scaling", False) and not scaler.is_enabled():
        read = _start_reading(numbers)
        _update_unread(optimizer, numbers[0], norm, grad_clip=grad_clip)
        return lambda: _result(read())
    with waiting_for("the sums of gradients and losses on its device"):
        result = _result(numbers.tolist())
    if result.updated and 0.0 < grad_clip < result.grad_norm:
        torch._foreach_mul_(gradients, grad_clip / result.grad_norm)
    if result.updated:
        scaler.step(optimizer)
    scaler.update()
    return lambda: result


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
    watch: Stopwatch | None = None,
) -> StepResult:
    """A whole step: the gradient, one update, its numbers."""
    gradient = compute_gradient(
        model,
        optimizer,
        micro_batches,
        objective,
        strategy,
        weight=weight,
        precision=precision,
        vote_to_stop=vote_to_stop,
        watch=watch,
    )
    return update(model, optimizer, gradient, precision=precision, lr=lr, grad_clip=grad_clip)()


def _start_reading(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host; what comes back waits for them, but not for what the device is given next."""
    if not numbers.is_cuda:
        return numbers.tolist
    copied = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def read() -> list[float]:
        with waiting_for("the sums of gradients and losses on its device"):
            arrived.synchronize()
        return copied.tolist()

    return read


def _update_unread(optimizer: torch.optim.Optimizer, loss: Tensor, norm: Tensor, *, grad_clip: float) -> None:
    """Clip and update before the host knows the numbers: the optimizer itself does nothing where they are not finite.

    So the device goes from backward to the update without a pause, and the host prepares the next step meanwhile.
    These two attributes are how torch's GradScaler does the same.
    """
    held: Any = optimizer
    held.grad_scale = (norm.float() / grad_clip).clamp(min=1.0) if grad_clip > 0.0 else torch.ones_like(norm)
    held.found_inf = 1.0 - (loss.isfinite() & norm.isfinite()).float()
    try:
        optimizer.step()
    finally:
        del held.grad_scale, held.found_inf


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
