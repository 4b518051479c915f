"""Triton kernels for the elementwise parts of Muon: passes before its matmuls and one after.

Momenta and weights may be some rows of a matrix; what is normalised is the whole, wherever its rows are from. One
launch handles all matrices of one shape: the kernel gets their addresses. Whether to skip a step is read on the
device, so there is no synchronization with the host. muon.py has the plain PyTorch version.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _look_ahead_kernel(
    gradients,  # int64 (n): addresses of float32 matrices, like the next
    momenta,  # int64 (n); the matrices are written
    ahead,  # bf16 (n, size), written
    updates,  # float32: number of previous updates
    divisor,  # float32: divides the gradients
    skipped,  # float32: above 0 to skip the update
    first, last, growth, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK values of one matrix."""
    matrix = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.load(gradients + matrix).to(tl.pointer_type(tl.float32)) + at
    momentum = tl.load(momenta + matrix).to(tl.pointer_type(tl.float32)) + at
    mu = first + (last - first) * tl.minimum(1.0, tl.load(updates) / growth)
    g = tl.load(gradient, mask=inside, other=0.0) / tl.load(divisor)
    m = tl.load(momentum, mask=inside, other=0.0)
    m += (g - m) * (1.0 - mu)
    if tl.load(skipped) == 0.0:
        tl.store(momentum, m, mask=inside)
    out = (g + (m - g) * mu).to(tl.bfloat16)
    tl.store(ahead + matrix.to(tl.int64) * size + at, out, mask=inside)


def muon_look_ahead(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    updates: Tensor,
    divisor: Tensor,
    skipped: Tensor,
    momentum: tuple[float, float, int],
) -> Tensor:
    """Update the momenta; returns Nesterov momentum, bf16 (n, rows, columns).

    momentum: initial value, final value, and the number of updates in between
    """
    shape, device = gradients[0].shape, gradients[0].device
    size = shape.numel()
    ahead = torch.empty(len(gradients), *shape, dtype=torch.bfloat16, device=device)
    blocks = triton.cdiv(size, _BLOCK)
    straight = [gradient.contiguous() for gradient in gradients]  # kept alive until the launch
    _look_ahead_kernel[(blocks, len(gradients))](
        _addresses(straight), _addresses(momenta), ahead, updates, divisor, skipped, *map(float, momentum), size,
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return ahead


def muon_normalise(ahead: Tensor) -> None:
    """Scale whole matrices to singular values of at most 1, in place: bf16 (n, rows, columns)."""
    size = ahead[0].numel()
    grid = triton.cdiv(size, _BLOCK), len(ahead)
    squares = torch.empty(len(ahead), grid[0], dtype=torch.float32, device=ahead.device)
    _squares_kernel[grid](ahead, squares, size, BLOCK=_BLOCK, num_warps=8)
    blocks = triton.next_power_of_2(grid[0])
    _normalise_kernel[grid](ahead, squares, grid[0], size, BLOCK=_BLOCK, BLOCKS=blocks, num_warps=8)


@triton.jit
def _squares_kernel(ahead, squares, size, BLOCK: tl.constexpr):
    """One program: the sum of squares of BLOCK values of one matrix."""
    matrix = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(ahead + matrix.to(tl.int64) * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(squares + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(value * value))


@triton.jit
def _normalise_kernel(ahead, squares, blocks, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """In place; one program: BLOCK values of one matrix."""
    matrix = tl.program_id(1)
    number = tl.arange(0, BLOCKS)
    square = tl.sum(tl.load(squares + matrix * blocks + number, mask=number < blocks, other=0.0))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = ahead + matrix.to(tl.int64) * size + at
    value = tl.load(place, mask=at < size, other=0.0).to(tl.float32) / (tl.sqrt(square) * 1.02 + 1e-7)
    tl.store(place, value.to(tl.bfloat16), mask=at < size)


@triton.jit
def _apply_kernel(matrices, directions, factors, skipped, rate, kept, size, columns, BLOCK: tl.constexpr):
    """One program: BLOCK values of one matrix."""
    matrix = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if tl.load(skipped) == 0.0:
        weight = tl.load(matrices + matrix).to(tl.pointer_type(tl.float32)) + at
        direction = tl.load(directions + matrix.to(tl.int64) * size + at, mask=inside, other=0.0).to(tl.float32)
        direction *= tl.load(factors + matrix * (size // columns) + at // columns, mask=inside, other=0.0)
        tl.store(weight, tl.load(weight, mask=inside, other=0.0) * kept - rate * direction, mask=inside)


def muon_apply(
    matrices: Sequence[Tensor], directions: Tensor, factors: Tensor, *, rate: float, kept: float, skipped: Tensor
) -> None:
    """matrix <- kept * matrix - rate * factor of the row * direction.

    matrices: n of float32 (rows, columns); directions: bf16 (n, rows, columns); factors: float32 (n, rows)
    """
    size, columns = matrices[0].numel(), matrices[0].size(1)
    _apply_kernel[(triton.cdiv(size, _BLOCK), len(matrices))](
        _addresses(matrices), directions.contiguous(), factors.contiguous(), skipped, float(rate), float(kept), size,
        columns, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """int64 (n) on their device."""
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
    return _on_device(tuple(tensor.data_ptr() for tensor in tensors), tensors[0].device)


@functools.lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 (n). Cached: tensors stay in place for many steps, and copies to the device cause stalls."""
    on_host = torch.tensor(numbers)
    return on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host
