"""Triton kernels for what comes before the blocks: embedding lookup and smear.

Each operation has a plain PyTorch reference next to it. This module needs Triton, which gpt.py checks.

Shapes: B sequences of T tokens, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from drumline.model import one_before, starts

_SMEAR_ROWS = 8


def embedding_reference(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of a float32 table in bf16: int64 (..), (V, D) -> (.., D)."""
    return F.embedding(ids, table).bfloat16()


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Like the reference; the gradient is summed with float32 atomics: fast, but not deterministic."""
    if torch.are_deterministic_algorithms_enabled():
        return embedding_reference(ids, table)
    result: Tensor = _Embedding.apply(ids, table)
    return result


@triton.jit
def _scatter_kernel(ids, rows, out, width: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(rows + row * width + column, mask=column < width).to(tl.float32)
    tl.atomic_add(out + tl.load(ids + row) * width + column, value, mask=column < width, sem="relaxed")


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return embedding_reference(ids, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        width = ctx.shape[1]
        by_table = torch.zeros(ctx.shape, dtype=torch.float32, device=ids.device)
        _scatter_kernel[(ids.numel(),)](
            ids, gradient.contiguous(), by_table, width=width, BLOCK=triton.next_power_of_2(width), num_warps=4
        )
        return None, by_table


def smeared_reference(x: Tensor, weights: Tensor, documents: Tensor | None = None) -> Tensor:
    """Each row plus the previous one of its sequence, or document, times the weights: (B, T, D), (D) -> (B, T, D)."""
    return x + weights * one_before(x, documents, last=None)


def smeared(x: Tensor, weights: Tensor, documents: Tensor | None = None) -> Tensor:
    """Like the reference, for bf16 x and float32 weights."""
    first = None if documents is None else starts(documents).flatten().to(torch.uint8)
    result: Tensor = _Smeared.apply(x, weights, first)
    return result


@triton.jit
def _smear_kernel(
    x, weights, out, first, rows, length, HAS_FIRST: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows. first: uint8 (N), 1 for the first row of a document"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    follows = inside & (row % length > 0)[:, None]
    if HAS_FIRST:
        follows = follows & (tl.load(first + row, mask=row < rows, other=1) == 0)[:, None]
    weight = tl.load(weights + column, mask=column < width, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value += weight[None, :] * tl.load(x + at - width, mask=follows, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(tl.bfloat16), mask=inside)


@triton.jit
def _smear_backward_kernel(
    gradient, x, weights, by_x, shares, first, rows, length, HAS_FIRST: tl.constexpr, width: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows, and their part of the weights' gradient, float32 (programs, D)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    weight = tl.load(weights + column, mask=column < width, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    goes_on = inside & (row % length < length - 1)[:, None]
    if HAS_FIRST:
        goes_on = goes_on & (tl.load(first + row + 1, mask=row + 1 < rows, other=1) == 0)[:, None]
    after = tl.load(gradient + at + width, mask=goes_on, other=0.0).to(tl.float32)
    own = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(by_x + at, (own + weight[None, :] * after).to(tl.bfloat16), mask=inside)
    tl.store(shares + tl.program_id(0) * width + column, tl.sum(value * after, axis=0), mask=column < width)


class _Smeared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, first: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights, first)
        length, width = x.shape[1:]
        rows, out = x.numel() // width, torch.empty_like(x)
        _smear_kernel[(triton.cdiv(rows, _SMEAR_ROWS),)](
            x, weights, out, first, rows, length, HAS_FIRST=first is not None, width=width,
            ROWS=_SMEAR_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights, first = ctx.saved_tensors
        length, width = x.shape[1:]
        rows, by_x = x.numel() // width, torch.empty_like(x)
        programs = triton.cdiv(rows, _SMEAR_ROWS)
        shares = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        _smear_backward_kernel[(programs,)](
            gradient.contiguous(), x, weights, by_x, shares, first, rows, length, HAS_FIRST=first is not None,
            width=width, ROWS=_SMEAR_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return by_x, shares.sum(0), None
