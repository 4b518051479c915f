"""AdamW as one Triton kernel for all weights of a group: each number is read once and written once.

torch's fused AdamW computes the same, but writes the scaled gradient too and does not get all of the GPU's bandwidth.
The state has torch's names and shapes, so a checkpoint does not tell which of them made it. Whether a step counts is
read on the device, so that nothing waits for the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drumline.fused_muon import addresses

_BLOCK = 4096


@triton.jit
def _adamw_kernel(
    weights, gradients, means, squares, steps,  # int64 (n): addresses of float32 tensors; gradients and steps are read
    sizes,  # int64 (n)
    tensors,  # int32 (blocks): which tensor a block is of
    firsts,  # int32 (n): the first block of each
    divisor,  # float32: of the gradients
    skipped,  # float32: above 0 where nothing is to change
    lr, eps, kept,
    beta1, rest1, log1, beta2, rest2, log2,  # a beta, 1 less it, its binary logarithm
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK numbers of one tensor."""
    if tl.load(skipped) == 0.0:
        tensor = tl.load(tensors + tl.program_id(0))
        at = (tl.program_id(0) - tl.load(firsts + tensor)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < tl.load(sizes + tensor)
        step = tl.load(tl.load(steps + tensor).to(tl.pointer_type(tl.float32))).to(tl.float64)
        # One minus a power of a number near 1: in float32 most digits would be gone.
        rate = lr / (1.0 - tl.exp2(step * log1)).to(tl.float32)
        correction = tl.sqrt((1.0 - tl.exp2(step * log2)).to(tl.float32))
        weight = tl.load(weights + tensor).to(tl.pointer_type(tl.float32)) + at
        mean = tl.load(means + tensor).to(tl.pointer_type(tl.float32)) + at
        square = tl.load(squares + tensor).to(tl.pointer_type(tl.float32)) + at
        gradient = tl.load(gradients + tensor).to(tl.pointer_type(tl.float32)) + at
        g = tl.load(gradient, mask=inside, other=0.0) / tl.load(divisor)
        m = tl.load(mean, mask=inside, other=0.0) * beta1 + g * rest1
        v = tl.load(square, mask=inside, other=0.0) * beta2 + g * g * rest2
        w = tl.load(weight, mask=inside, other=0.0) * kept - rate * m / (tl.sqrt(v) / correction + eps)
        tl.store(mean, m, mask=inside)
        tl.store(square, v, mask=inside)
        tl.store(weight, w, mask=inside)


class OnePassAdamW(torch.optim.AdamW):
    """torch's AdamW for contiguous float32 weights on one CUDA device."""

    found_inf: Tensor
    """This and the next as torch's GradScaler sets them: above 0 where nothing is to change; gradients' divisor."""
    grad_scale: Tensor | None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of all weights that have a gradient; a closure is not called."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._update(group, weights)

    def _update(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        device = weights[0].device
        states = [self._state_of(weight) for weight in weights]
        gradients = [weight.grad.contiguous() for weight in weights if weight.grad is not None]
        steps, means, squares = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
        one = torch.ones((), device=device)
        skipped, divisor = vars(self).get("found_inf"), vars(self).get("grad_scale")
        skipped = 1.0 - one if skipped is None else skipped
        torch._foreach_add_(steps, 1.0 - skipped)
        sizes, tensors, firsts = _blocks(tuple(weight.numel() for weight in weights), device)
        _adamw_kernel[(len(tensors),)](
            *map(addresses, (weights, gradients, means, squares, steps)), sizes, tensors, firsts,
            one if divisor is None else divisor, skipped, float(group["lr"]), float(group["eps"]),
            1.0 - group["lr"] * group["weight_decay"],
            *(number for beta in group["betas"] for number in (beta, 1.0 - beta, math.log2(beta))),
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state


@functools.cache
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel needs to find its numbers: int64 (n), int32 (blocks), int32 (n)."""
    counts = torch.tensor([triton.cdiv(size, _BLOCK) for size in sizes])
    tensors = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    tables = torch.tensor(sizes), tensors.int(), (counts.cumsum(0) - counts).int()
    return tables[0].to(device), tables[1].to(device), tables[2].to(device)
