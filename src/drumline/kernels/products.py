"""Matmuls of a modern block: with the squared ReLU fused into the matmul, and weight gradients in float32.

Each operation has a plain PyTorch reference next to it. This module needs Triton, and its squared ReLU a GPU with TMA
(Hopper), which gpt.py checks.

Shapes: N tokens, D width, F hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def relu2_mlp_reference(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """(N, D), (F, D), (D, F) -> (N, D)."""
    return F.linear(F.relu(F.linear(x, up)).square(), down)


def relu2_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Like the reference, for bf16 x: matmul and activation are one kernel in each direction."""
    result: Tensor = _Relu2MLP.apply(x, up, down)
    return result


@triton.jit
def _relu2_product_kernel(
    a_tiles,  # (M, K)
    b_tiles,  # (N, K) forward, (K, N) backward
    squared_tiles,  # (M, N): written forward, read backward
    out_tiles,  # (M, N): written backward
    M, N, K,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Forward: relu(a b^T)^2. Backward: (a b) * 2 sqrt(squared), the gradient before the activation.

    The squared ReLU determines its own derivative, 2 relu(h) = 2 sqrt(relu(h)^2), so h itself is never stored.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    in_group = GROUP * tiles_n
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        first_m = tile // in_group * GROUP
        height = min(tiles_m - first_m, GROUP)
        at_m = (first_m + (tile % in_group) % height) * BLOCK_M
        at_n = ((tile % in_group) // height) * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_tiles.load([at_m, k])
            if BACKWARD:
                b = b_tiles.load([k, at_n])
                total = tl.dot(a, b, total)
            else:
                b = b_tiles.load([at_n, k])
                total = tl.dot(a, b.T, total)
        # Two half-wide stores keep the staging buffers small.
        halves = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            column = at_n + half * (BLOCK_N // 2)
            if BACKWARD:
                slope = tl.sqrt(squared_tiles.load([at_m, column]).to(tl.float32))
                out_tiles.store([at_m, column], (2.0 * halves[half] * slope).to(tl.bfloat16))
            else:
                positive = tl.maximum(halves[half], 0.0)
                squared_tiles.store([at_m, column], (positive * positive).to(tl.bfloat16))


class _Relu2MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        up, down = up.to(x.dtype), down.to(x.dtype)
        squared = torch.empty(x.size(0), up.size(0), dtype=x.dtype, device=x.device)
        m, n, k = 128, 256, 64
        programs = processors(x.device)
        tiles = TensorDescriptor.from_tensor(squared, [m, n // 2])
        _relu2_product_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [m, k]), TensorDescriptor.from_tensor(up, [n, k]), tiles, tiles,
            x.size(0), up.size(0), x.size(1), BACKWARD=False, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP=8,
            PROGRAMS=programs, FLATTEN=True, num_stages=3, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(x, up, down, squared)
        return squared @ down.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, up, down, squared = ctx.saved_tensors
        by_inner = torch.empty_like(squared)
        # Smaller tiles than in forward, two programs per SM: one reads `squared` while the other multiplies.
        m, n, k = 128, 128, 64
        programs = 2 * processors(x.device)
        gradient = gradient.contiguous()
        _relu2_product_kernel[(programs,)](
            TensorDescriptor.from_tensor(gradient, [m, k]), TensorDescriptor.from_tensor(down, [k, n]),
            TensorDescriptor.from_tensor(squared, [m, n // 2]), TensorDescriptor.from_tensor(by_inner, [m, n // 2]),
            x.size(0), up.size(0), x.size(1), BACKWARD=True, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP=8,
            PROGRAMS=programs, FLATTEN=False, num_stages=3, num_warps=4,
        )  # fmt: skip
        return by_inner @ up, by_weight(by_inner, x), by_weight(gradient, squared)


def linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """(N, K), (M, K) -> (N, M)."""
    return F.linear(x, weight.to(x.dtype))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Like the reference; the gradient of a float32 weight is never rounded to bf16."""
    result: Tensor = _Linear.apply(x, weight)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, by_weight(gradient, x)


def by_weight(gradient: Tensor, x: Tensor) -> Tensor:
    """The weight gradient of a matmul, written directly in float32: bf16 (N, M), (N, K) -> (M, K)."""
    if not x.is_cuda:
        return gradient.t().float() @ x.float()
    product: Tensor = torch.mm(gradient.t(), x, out_dtype=torch.float32)
    return product


def processors(device: torch.device) -> int:
    """Number of SMs of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
