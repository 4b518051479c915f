"""AdamW for --bitwise on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ExactAdamW(torch.optim.AdamW):
    """AdamW of sums, products, quotients and square roots alone, each of which has one correct result.

    torch's own CPU kernels compute most of a tensor with vector instructions, which round a product and a sum at once,
    but its last few numbers one by one: whole weights and parts of them would differ in a bit now and then.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient; a closure is not called."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(group, weight)

    def _update(self, group: dict[str, Any], weight: Tensor) -> None:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        step, (beta1, beta2), lr = int(state["step"]), group["betas"], group["lr"]
        mean, square, gradient = _own(state["exp_avg"]), _own(state["exp_avg_sq"]), _own(weight.grad)
        mean.mul_(beta1).add_(gradient * (1.0 - beta1))
        square.mul_(beta2).add_((gradient * gradient).mul_(1.0 - beta2))
        divisor = square.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(group["eps"])
        _own(weight).mul_(1.0 - lr * group["weight_decay"]).sub_((mean / divisor).mul_(lr / (1.0 - beta1**step)))


def _own(tensor: Any) -> Tensor:
    """What this rank has of it."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own
