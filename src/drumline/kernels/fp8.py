"""Feed-forward layers and output head in float8: all matmuls of forward and backward, with Hopper's operand layouts.

Hopper's float8 matmuls read both operands along the contracted dimension, so operands that are contracted along both
dimensions are stored in both layouts, each written by the kernel that computes the values. Activations and weights are
e4m3 (4 exponent bits, 3 mantissa bits), gradients e5m2. The results of matmuls are bf16.

Scales. Outputs of a norm have a known range and are multiplied by NORMED_SCALE. A squared ReLU is stored unscaled,
clamped to 448. A weight is scaled by its absolute maximum, which changes with every step, so its copies are made in
each forward. Each layer scales its own gradient, because gradients are many times larger where the residual stream is
small: the absolute maximum becomes GRADIENT_TOP, and the gradient before the activation, which keeps that scale, may
be 900 times larger before e5m2 saturates. Values beyond the range of a format are clamped to it.

Each kernel has a plain PyTorch reference next to it, which also runs on a CPU without Triton: it rounds to the same
float8 values and computes in float32. It is for tests; gpt.py decides what runs.

Shapes: N tokens, D width, F hidden width, V vocabulary, R rows, C columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit: Callable[..., Any] = triton.jit
except ImportError:  # then no kernel is compiled or launched

    def jit(kernel: Any) -> Any:
        return kernel


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NORMED_SCALE = 4.0
"""A power of two. A row of D values with an RMS of 1 has none above sqrt(D), and e4m3 ends at 4 x 112: that is enough
for widths up to 12544, or for a learned norm weight of 4 at a width of 768."""
GRADIENT_TOP = 64.0
LOGIT_TOP = 1024.0
"""Scale of the gradient of the logits, which is at most 1 per token."""


class Float8(NamedTuple):
    """A scaled matrix (R, C) in both layouts."""

    straight: Tensor
    """(R, C)"""
    turned: Tensor
    """(C, R), contiguous too."""
    inverse: Tensor
    """1 / scale: float32 scalar."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest float8 value, clamped to the range."""
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


def both_orders_reference(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x * scale as float8 (R, C) and (C, R)."""
    straight = rounded(x.float() * scale, dtype)
    return straight, transposed_reference(straight)


@jit
def _both_orders_kernel(
    source, straight, turned, scale, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """One program: a tile of ROWS x COLUMNS."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    value = tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    float8: tl.constexpr = straight.dtype.element_ty
    tl.store(straight + at, value.to(float8), mask=inside)
    tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(value.to(float8)), mask=tl.trans(inside))


def both_orders_by_kernel(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Like the reference, for bf16: from a float32 tile, Triton 3.6 writes wrong values in the transposed layout."""
    assert x.dtype == torch.bfloat16
    x = x.contiguous()
    rows, columns = x.shape
    straight = torch.empty(rows, columns, dtype=dtype, device=x.device)
    turned = torch.empty(columns, rows, dtype=dtype, device=x.device)
    _both_orders_kernel[(triton.cdiv(columns, 64), triton.cdiv(rows, 128))](
        x, straight, turned, scale, rows, columns, ROWS=128, COLUMNS=64, num_warps=8
    )
    return straight, turned


def transposed_reference(x: Tensor) -> Tensor:
    """A float8 (R, C) as contiguous (C, R)."""
    return x.view(torch.uint8).t().contiguous().view(x.dtype)


@jit
def _transpose_kernel(source, turned, rows, columns, SIDE: tl.constexpr):
    """On bytes. One program: a tile of SIDE x SIDE."""
    row = (tl.program_id(1) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    column = (tl.program_id(0) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    byte = tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0)
    tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(byte), mask=tl.trans(inside))


def transposed_by_kernel(x: Tensor) -> Tensor:
    """Like the reference, for contiguous x."""
    rows, columns = x.shape
    turned = torch.empty(columns, rows, dtype=x.dtype, device=x.device)
    _transpose_kernel[(triton.cdiv(columns, 128), triton.cdiv(rows, 128))](
        x.view(torch.uint8), turned.view(torch.uint8), rows, columns, SIDE=128, num_warps=8
    )
    return turned


def product_reference(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor) -> Tensor:
    """a b^T in bf16: float8 (M, K), float8 (N, K), each with 1 / scale."""
    return ((a.float() @ b.float().t()) * (a_inverse * b_inverse)).bfloat16()


def product(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, *, fast: bool, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Like the reference, with another output dtype if needed; all sizes must be multiples of 16.

    fast: use the GPU's fast accumulator, which has fewer bits than float32. Enough for forward; matmuls in backward
          contract over all tokens, or over the whole vocabulary, where the error does not average out
    """
    if not a.is_cuda:
        return product_reference(a, b, a_inverse, b_inverse).to(dtype)
    return torch._scaled_mm(a, b.t(), a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast)


def relu2_product_reference(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, squared: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Forward (`squared` is None): relu(a b^T)^2, e4m3. Backward: a b^T * 2 sqrt(squared), e5m2, at a's scale.

    float8 (M, K), (N, K), (M, N) -> (M, N) and (N, M)
    """
    inner = (a.float() @ b.float().t()) * b_inverse
    if squared is None:
        straight = rounded((inner * a_inverse).relu().square(), E4M3)
    else:
        straight = rounded(2.0 * inner * squared.float().sqrt(), E5M2)
    return straight, transposed_reference(straight)


@jit
def _relu2_product_kernel(
    a_tiles,  # float8 (M, K)
    b_tiles,  # float8 (N, K)
    squared_tiles,  # e4m3 (M, N): read backward
    straight_tiles,  # (M, N): written
    turned_tiles,  # (N, M): written
    a_inverse, b_inverse,
    M, N, K,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Like the kernel in products. Both directions contract over the width only, so the fast accumulator is enough."""
    factor = tl.load(b_inverse)
    if not BACKWARD:
        factor *= tl.load(a_inverse)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    in_group = GROUP * tiles_n
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        first_m = (tile // in_group) * GROUP
        height = min(tiles_m - first_m, GROUP)
        at_m = (first_m + (tile % in_group) % height) * BLOCK_M
        at_n = ((tile % in_group) // height) * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            total = tl.dot(a_tiles.load([at_m, k]), b_tiles.load([at_n, k]).T, total)
        # Two half-wide stores keep the staging buffers small.
        halves = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            column = at_n + half * (BLOCK_N // 2)
            if BACKWARD:
                slope = tl.sqrt(squared_tiles.load([at_m, column]).to(tl.float32))
                out = (2.0 * factor * halves[half] * slope).to(tl.float8e5)
            else:
                positive = tl.maximum(halves[half] * factor, 0.0)
                out = tl.minimum(positive * positive, 448.0).to(tl.float8e4nv)
            straight_tiles.store([at_m, column], out)
            turned_tiles.store([column, at_m], out.T)


def relu2_product_by_kernel(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, squared: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Like the reference; M and K must be multiples of 16."""
    m, n, k = 128, 256, 128
    rows, columns = a.size(0), b.size(0)
    dtype = E4M3 if squared is None else E5M2
    straight = torch.empty(rows, columns, dtype=dtype, device=a.device)
    turned = torch.empty(columns, rows, dtype=dtype, device=a.device)
    tiles = TensorDescriptor.from_tensor(straight, [m, n // 2])
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 1
    _relu2_product_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [m, k]), TensorDescriptor.from_tensor(b, [n, k]),
        tiles if squared is None else TensorDescriptor.from_tensor(squared, [m, n // 2]), tiles,
        TensorDescriptor.from_tensor(turned, [n // 2, m]), a_inverse, b_inverse, rows, columns, a.size(1),
        BACKWARD=squared is not None, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP=8, PROGRAMS=programs,
        num_stages=3, num_warps=8,
    )  # fmt: skip
    return straight, turned


def both_orders(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (both_orders_by_kernel if x.is_cuda else both_orders_reference)(x.bfloat16(), scale, dtype)


def transposed(x: Tensor) -> Tensor:
    return (transposed_by_kernel if x.is_cuda else transposed_reference)(x)


def relu2_product(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, squared: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    chosen = relu2_product_by_kernel if a.is_cuda else relu2_product_reference
    return chosen(a, b, a_inverse, b_inverse, squared)


def float8_normed(x: Tensor) -> Float8:
    """The output of a norm, (N, D), as e4m3."""
    return Float8(*both_orders(x, scalar(NORMED_SCALE, x.device), E4M3), scalar(1.0 / NORMED_SCALE, x.device))


@torch.no_grad()
def float8_weights(weights: Sequence[Tensor]) -> list[Float8]:
    """Matrices as e4m3, each with its own scale; all maxima are computed at once, then one launch per matrix."""
    tops = torch.stack(torch._foreach_norm(list(weights), float("inf"))).float().clamp_min(1e-12)
    end = torch.finfo(E4M3).max
    # cuBLAS needs its scales 16-byte aligned, and a kernel would be compiled again for unaligned pointers.
    numbers = torch.stack((end / tops, tops / end), dim=1)[:, :, None].repeat(1, 1, 4)  # (weights, 2, 4)
    return [
        Float8(*both_orders(weight, each[0, 0], E4M3), each[1, 0])
        for weight, each in zip(weights, numbers.unbind(), strict=True)
    ]


def float8_gradient(gradient: Tensor) -> Float8:
    """A gradient as e5m2, with its absolute maximum at GRADIENT_TOP."""
    # A gradient with NaN or Inf makes the scale 0 or NaN, and so remains detectable.
    top = torch.linalg.vector_norm(gradient, float("inf")).float().clamp_min(1e-30)
    return Float8(*both_orders(gradient, GRADIENT_TOP / top, E5M2), top / GRADIENT_TOP)


@functools.cache
def scalar(value: float, device: torch.device) -> Tensor:
    """A float32 scalar on the device."""
    return torch.full((), value, dtype=torch.float32, device=device)


def relu2_mlp(x: Tensor, up: Tensor, down: Tensor, up8: Float8, down8: Float8) -> Tensor:
    """Like products.relu2_mlp_reference, for the output of a norm.

    x: bf16 (N, D); up: float32 (F, D); down: float32 (D, F); up8, down8: this forward's float8 copies of them
    """
    result: Tensor = _Relu2MLP.apply(x, up, down, up8, down8)
    return result


class _Relu2MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, up8: Float8, down8: Float8) -> Tensor:
        x8 = float8_normed(x)
        squared, squared_turned = relu2_product(x8.straight, up8.straight, x8.inverse, up8.inverse)
        ctx.save_for_backward(
            x8.turned, squared, squared_turned, up8.turned, down8.turned, x8.inverse, up8.inverse, down8.inverse
        )
        return product(squared, down8.straight, scalar(1.0, x.device), down8.inverse, fast=True).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_turned, squared, squared_turned, up_turned, down_turned, *inverses = ctx.saved_tensors
        x_inverse, up_inverse, down_inverse = inverses
        g8 = float8_gradient(gradient)
        inner, inner_turned = relu2_product(g8.straight, down_turned, g8.inverse, down_inverse, squared)
        by_x = product(inner, up_turned, g8.inverse, up_inverse, fast=False)
        weights = functools.partial(product, fast=False, dtype=torch.float32)
        by_up = weights(inner_turned, x_turned, g8.inverse, x_inverse)
        by_down = weights(g8.turned, squared_turned, g8.inverse, scalar(1.0, gradient.device))
        return by_x.to(gradient.dtype), by_up, by_down, None, None
