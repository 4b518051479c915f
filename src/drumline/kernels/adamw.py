"""AdamW as one Triton kernel for all weights of a parameter group: each value is read once and written once.

torch's fused AdamW computes the same, but also writes the unscaled gradients and does not reach the GPU's full memory
bandwidth. The state has torch's names and shapes, so checkpoints are interchangeable. Whether to skip a step is read
on the device, so there is no synchronization with the host.
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
from torch.distributed.tensor import DTensor

_BLOCK = 4096


@triton.jit
def _adamw_kernel(
    blocks,  # int64 (3, blocks): number of a block's tensor, where the block starts in it, its length
    addresses,  # int64 (5, tensors): weights, gradients, both moments, step
    tensors,
    divisor,  # float32: divides the gradients
    skipped,  # float32: above 0 to skip the update
    lr, eps, kept,
    beta1, rest1, log1, beta2, rest2, log2,  # beta, 1 - beta, log2(beta)
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: a block of at most BLOCK values."""
    block = blocks + tl.program_id(0)
    address = addresses + tl.load(block)
    start = tl.load(block + tl.num_programs(0)) + tl.arange(0, BLOCK)
    count = tl.load(block + 2 * tl.num_programs(0))
    inside = tl.arange(0, BLOCK) < count
    weight = tl.load(address).to(tl.pointer_type(tl.float32)) + start
    gradient = tl.load(address + tensors).to(tl.pointer_type(tl.float32)) + start
    mean = tl.load(address + 2 * tensors).to(tl.pointer_type(tl.float32)) + start
    square = tl.load(address + 3 * tensors).to(tl.pointer_type(tl.float32)) + start
    step = tl.load(tl.load(address + 4 * tensors).to(tl.pointer_type(tl.float32))).to(tl.float64)
    g = tl.load(gradient, mask=inside, other=0.0) / tl.load(divisor)
    m = tl.load(mean, mask=inside, other=0.0) * beta1 + g * rest1
    v = tl.load(square, mask=inside, other=0.0) * beta2 + g * g * rest2
    # 1 - x for x close to 1: float32 would lose most digits.
    rate = lr / (1.0 - tl.exp2(step * log1)).to(tl.float32)
    correction = tl.sqrt((1.0 - tl.exp2(step * log2)).to(tl.float32))
    w = tl.load(weight, mask=inside, other=0.0) * kept - rate * m / (tl.sqrt(v) / correction + eps)
    changes = tl.arange(0, BLOCK) < tl.where(tl.load(skipped) == 0.0, count, 0)
    tl.store(mean, m, mask=changes)
    tl.store(square, v, mask=changes)
    tl.store(weight, w, mask=changes)


class OnePassAdamW(torch.optim.AdamW):
    """torch's AdamW for contiguous float32 weights on one CUDA device."""

    found_inf: Tensor
    """These two as torch's GradScaler sets them: above 0 to skip the update; divisor of the gradients."""
    grad_scale: Tensor | None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update all weights that have a gradient; a closure is not called."""
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
        torch._foreach_add_(steps, [1.0 - skipped] * len(steps))  # with a tensor instead, the host would wait
        # Of weights that are spread over ranks, this rank's part.
        weights, gradients, means, squares = (
            [each.to_local() if isinstance(each, DTensor) else each for each in whole]
            for whole in (weights, gradients, means, squares)
        )
        lists = (weights, gradients, means, squares, steps)
        addresses = torch.tensor([[tensor.data_ptr() for tensor in each] for each in lists])
        blocks = _blocks(tuple(weight.numel() for weight in weights), device)
        _adamw_kernel[(blocks.size(1),)](
            blocks, _there(addresses, device), len(weights), one if divisor is None else divisor, skipped,
            float(group["lr"]), float(group["eps"]), 1.0 - group["lr"] * group["weight_decay"],
            *(number for beta in group["betas"] for number in (float(beta), 1.0 - beta, _log2(beta))),
            BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state


def _log2(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf


@functools.lru_cache(maxsize=8)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Tensors of these sizes in blocks for the kernel. Apart from the addresses: gradients change theirs at any step,
    and a large model has hundreds of thousands of blocks."""
    counts = torch.tensor([triton.cdiv(size, _BLOCK) for size in sizes])
    which = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    start = (torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]) * _BLOCK
    left = (torch.tensor(sizes)[which] - start).clamp(max=_BLOCK)
    return _there(torch.stack((which, start, left)), device)


def _there(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
