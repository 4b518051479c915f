"""An update that the GPU makes before the host has read the step's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drumline.parallel import waiting_for


def update_unread(
    optimizer: torch.optim.Optimizer, numbers: Tensor, norm: Tensor, *, grad_clip: float
) -> Callable[[], list[float]]:
    """Clip and update before the host knows the numbers: the optimizer itself does nothing where they are not finite.

    So the device goes from backward to the update without a pause, and the host prepares the next step meanwhile.
    What comes back waits for the numbers, but not for what the device is given next.

    numbers: (N,), of which the first is the loss; norm: () of the gradient
    """
    read = _start_reading(numbers)
    # These two attributes are how torch's GradScaler does the same.
    scaled: Any = optimizer
    scaled.grad_scale = (norm.float() / grad_clip).clamp(min=1.0) if grad_clip > 0.0 else torch.ones_like(norm)
    scaled.found_inf = 1.0 - (numbers[0].isfinite() & norm.isfinite()).float()
    try:
        optimizer.step()
    finally:
        del scaled.grad_scale, scaled.found_inf
    return read


def _start_reading(numbers: Tensor) -> Callable[[], list[float]]:
    """Begin to copy numbers to the host."""
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
