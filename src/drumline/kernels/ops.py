"""Triton kernels for the parts of a modern block other than matmuls, forward and backward.

Each fuses several passes over memory, which dominate the cost of such parts. Activations are bf16 in memory and float32
inside a kernel; learned norm weights are float32. Each operation has a plain PyTorch reference next to it.

This module needs Triton, which gpt.py checks.

Shapes: N tokens (B sequences of T), D width, H heads, W head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from drumline.kernels.products import by_weight

EPSILON = 1e-6
# Tokens per program: few, so that it needs few registers and many run concurrently.
_NORM_ROWS = 4
_TURN_ROWS, _TURN_TIMES = 16, 8
_TILE_ROWS, _TILE_COLUMNS = 64, 128


def add_rms_norm_reference(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x + delta, RMSNorm of that)."""
    x = x if delta is None else x + delta
    return x, F.rms_norm(x.float(), (x.size(-1),), eps=EPSILON).type_as(x)


def add_rms_norm(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Like the reference, for bf16 (N, D), bf16 (N, D) or None."""
    result: tuple[Tensor, Tensor] = _AddRMSNorm.apply(x, delta)
    return result


@triton.jit
def _add_rms_norm_kernel(
    x, delta, sums, normed, rstd, rows, eps, HAS_DELTA: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(tl.bfloat16).to(tl.float32)  # normalize what is actually stored in the residual stream
        tl.store(sums + at, value.to(tl.bfloat16), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(normed + at, (value * scale[:, None]).to(tl.bfloat16), mask=inside)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def _add_rms_norm_backward_kernel(
    by_sum, by_normed, sums, rstd, by_x, rows, HAS_SUM: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    scale = tl.load(rstd + row, mask=row < rows, other=0.0)
    unit = tl.load(sums + at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    gradient = tl.load(by_normed + at, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(gradient * unit, axis=1) / width
    gradient = (gradient - unit * along[:, None]) * scale[:, None]
    if HAS_SUM:
        gradient += tl.load(by_sum + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(by_x + at, gradient.to(tl.bfloat16), mask=inside)


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        normed = torch.empty_like(x)
        sums = x if delta is None else torch.empty_like(x)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        _add_rms_norm_kernel[(triton.cdiv(rows, _NORM_ROWS),)](
            x, delta, sums, normed, rstd, rows, EPSILON, HAS_DELTA=delta is not None, width=width,
            ROWS=_NORM_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(sums, rstd)
        ctx.set_materialize_grads(False)
        ctx.has_delta = delta is not None
        return (x.view_as(x) if delta is None else sums), normed

    @staticmethod
    def backward(ctx: Any, by_sum: Tensor | None, by_normed: Tensor) -> tuple[Tensor | None, ...]:
        sums, rstd = ctx.saved_tensors
        rows, width = sums.shape
        by_x = torch.empty_like(sums)
        _add_rms_norm_backward_kernel[(triton.cdiv(rows, _NORM_ROWS),)](
            by_sum, by_normed.contiguous(), sums, rstd, by_x, rows, HAS_SUM=by_sum is not None, width=width,
            ROWS=_NORM_ROWS, BLOCK=triton.next_power_of_2(width), num_warps=8,
        )  # fmt: skip
        return by_x, (by_x if ctx.has_delta else None)


def times_columns_reference(matrix: Tensor, factors: Tensor) -> Tensor:
    """Scale columns: (R, C), (C) -> (R, C)."""
    return matrix * factors


def times_columns(matrix: Tensor, factors: Tensor) -> Tensor:
    """Like the reference, for float32: multiplies the learned weights of a norm into the matrix that follows it.

    This costs a pass over the matrix instead of a pass over all tokens.
    """
    result: Tensor = _TimesColumns.apply(matrix, factors)
    return result


@triton.jit
def _times_columns_backward_kernel(
    gradient, matrix, factors, by_matrix, shares, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program: a tile of ROWS x COLUMNS, and its part of the scales' gradient, (row of tiles, C)."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    g = tl.load(gradient + at, mask=inside, other=0.0)
    factor = tl.load(factors + column, mask=column < columns, other=0.0)
    tl.store(by_matrix + at, g * factor[None, :], mask=inside)
    share = tl.sum(g * tl.load(matrix + at, mask=inside, other=0.0), axis=0)
    tl.store(shares + tl.program_id(1) * columns + column, share, mask=column < columns)


class _TimesColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, factors)
        return matrix * factors

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        matrix, factors = ctx.saved_tensors
        (rows, columns), by_matrix = matrix.shape, torch.empty_like(matrix)
        tiles = triton.cdiv(rows, _TILE_ROWS)
        shares = torch.empty(tiles, columns, dtype=torch.float32, device=matrix.device)
        _times_columns_backward_kernel[(triton.cdiv(columns, _TILE_COLUMNS), tiles)](
            gradient.contiguous(), matrix, factors, by_matrix, shares, rows, columns, ROWS=_TILE_ROWS,
            COLUMNS=_TILE_COLUMNS, num_warps=4,
        )  # fmt: skip
        return by_matrix, shares.sum(0)


def qkv_reference(
    x: Tensor,
    weight: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    extra_values: Tensor | None,
    rope: Tensor,
    *,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys after QK norm and rotary embedding, and values plus value embeddings.

    (N, D), (3 D, D), 2 (W), (B, H, T, W), (2, T, W/2) -> 3 (B, H, T, W)
    """
    cos, sin = rope
    split = F.linear(x, weight).view(-1, len(cos), 3, heads, x.size(1) // heads).permute(2, 0, 3, 1, 4)
    turned = []
    for part, learned in zip(split[:2], (query_norm, key_norm), strict=True):
        unit = F.rms_norm(part.float(), (part.size(-1),), eps=EPSILON) * learned
        first, second = unit.chunk(2, dim=-1)
        turned.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x))
    return turned[0], turned[1], split[2] if extra_values is None else split[2] + extra_values


def qkv(
    x: Tensor,
    weight: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    extra_values: Tensor | None,
    rope: Tensor,
    *,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like the reference, for bf16 x, float32 norms and rope: views of one buffer. None: norms without weights."""
    norms = None if query_norm is None or key_norm is None else torch.stack((query_norm, key_norm))
    result: tuple[Tensor, Tensor, Tensor] = _QKV.apply(x, weight, norms, extra_values, rope.contiguous(), heads)
    return result


@triton.jit
def _norm_turn_kernel(
    qkv, rstd, norms, extra, cos, sin, rows, length, eps, LEARNS: tl.constexpr, HAS_EXTRA: tl.constexpr,
    heads: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """In place on bf16 (N, 3, H, W); extra, added to values: bf16 (N, H, W). One program: ROWS tokens of one head."""
    head = tl.program_id(0)  # 0 .. 2 H, or with values 3 H
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half: tl.constexpr = width // 2
    column = tl.arange(0, half)
    if HAS_EXTRA:  # noqa: SIM102 - what follows must not be looked at otherwise
        if head >= 2 * heads:
            whole = tl.arange(0, width)
            there = (row < rows)[:, None] & (whole < width)[None, :]
            place = qkv + row.to(tl.int64)[:, None] * (3 * heads * width) + head * width + whole[None, :]
            more = extra + row.to(tl.int64)[:, None] * (heads * width) + (head - 2 * heads) * width + whole[None, :]
            value = tl.load(place, mask=there).to(tl.float32) + tl.load(more, mask=there).to(tl.float32)
            tl.store(place, value.to(tl.bfloat16), mask=there)
            return
    inside = (row < rows)[:, None] & (column < half)[None, :]
    at = row.to(tl.int64)[:, None] * (3 * heads * width) + head * width + column[None, :]
    first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + half, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / width + eps)
    first *= scale[:, None]
    second *= scale[:, None]
    if LEARNS:
        learned = norms + (head // heads) * width + column
        first *= tl.load(learned)[None, :]
        second *= tl.load(learned + half)[None, :]
    place = (row % length)[:, None] * half + column[None, :]
    c = tl.load(cos + place)
    s = tl.load(sin + place)
    tl.store(qkv + at, (first * c - second * s).to(tl.bfloat16), mask=inside)
    tl.store(qkv + at + half, (second * c + first * s).to(tl.bfloat16), mask=inside)
    tl.store(rstd + row.to(tl.int64) * (2 * heads) + head, scale, mask=row < rows)


@triton.jit
def _norm_turn_backward_kernel(
    by_q, by_k, by_v, qkv, rstd, norms, by_qkv, by_norms, cos, sin, rows, length, LEARNS: tl.constexpr,
    heads: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """by_q, by_k, by_v: bf16 (N, H, W); qkv as the forward kernel left it; by_qkv: bf16 (N, 3, H, W), written.

    One program: TIMES times ROWS tokens of one head and, if the norms have weights, their part of the norms' gradient,
    float32 (.., 2 H, W).
    """
    slot = tl.program_id(0)  # 0 .. 3 H
    part = slot // heads
    half: tl.constexpr = width // 2
    column = tl.arange(0, half)
    if LEARNS:
        learned = norms + tl.minimum(part, 1) * width + column
        w_first = tl.load(learned)[None, :]
        w_second = tl.load(learned + half)[None, :]
        share_first = tl.zeros((ROWS, half), dtype=tl.float32)
        share_second = tl.zeros((ROWS, half), dtype=tl.float32)
    for time in range(TIMES):
        row = (tl.program_id(1) * TIMES + time) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < half)[None, :]
        at = row.to(tl.int64)[:, None] * (3 * heads * width) + slot * width + column[None, :]
        incoming = row.to(tl.int64)[:, None] * (heads * width) + (slot % heads) * width + column[None, :]
        if part == 2:
            tl.store(by_qkv + at, tl.load(by_v + incoming, mask=inside), mask=inside)
            tl.store(by_qkv + at + half, tl.load(by_v + incoming + half, mask=inside), mask=inside)
        else:
            source = by_q
            if part == 1:
                source = by_k
            g_first = tl.load(source + incoming, mask=inside, other=0.0).to(tl.float32)
            g_second = tl.load(source + incoming + half, mask=inside, other=0.0).to(tl.float32)
            t_first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
            t_second = tl.load(qkv + at + half, mask=inside, other=0.0).to(tl.float32)
            place = (row % length)[:, None] * half + column[None, :]
            c = tl.load(cos + place)
            s = tl.load(sin + place)
            # Rotate both back. Forward left weight times unit vector, so the unit vector need not be stored too.
            h_first = g_first * c + g_second * s
            h_second = g_second * c - g_first * s
            u_first = t_first * c + t_second * s
            u_second = t_second * c - t_first * s
            if LEARNS:
                u_first = tl.where(w_first == 0.0, 0.0, u_first / w_first)
                u_second = tl.where(w_second == 0.0, 0.0, u_second / w_second)
                share_first += h_first * u_first
                share_second += h_second * u_second
                h_first *= w_first
                h_second *= w_second
            along = (tl.sum(h_first * u_first + h_second * u_second, axis=1) / width)[:, None]
            scale = tl.load(rstd + row.to(tl.int64) * (2 * heads) + slot, mask=row < rows, other=0.0)[:, None]
            tl.store(by_qkv + at, ((h_first - u_first * along) * scale).to(tl.bfloat16), mask=inside)
            tl.store(by_qkv + at + half, ((h_second - u_second * along) * scale).to(tl.bfloat16), mask=inside)
    if LEARNS:  # noqa: SIM102 - what follows must not be looked at otherwise
        if part < 2:
            share = by_norms + (tl.program_id(1) * (2 * heads) + slot) * width + column
            tl.store(share, tl.sum(share_first, axis=0))
            tl.store(share + half, tl.sum(share_second, axis=0))


class _QKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        norms: Tensor | None,
        extra_values: Tensor | None,
        rope: Tensor,
        heads: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, width, length = x.size(0), x.size(1) // heads, rope.size(1)
        weight = weight.to(x.dtype)
        qkv = x @ weight.t()  # (N, 3 D)
        rstd = torch.empty(rows, 2 * heads, dtype=torch.float32, device=x.device)
        extra = None if extra_values is None else extra_values.transpose(1, 2).contiguous()
        slots = 2 * heads if extra is None else 3 * heads
        _norm_turn_kernel[(slots, triton.cdiv(rows, _TURN_ROWS))](
            qkv, rstd, norms, extra, rope[0], rope[1], rows, length, EPSILON, LEARNS=norms is not None,
            HAS_EXTRA=extra is not None, heads=heads, width=width, ROWS=_TURN_ROWS, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, norms, rope, qkv, rstd)
        ctx.heads = heads
        q, k, v = qkv.view(-1, length, 3, heads, width).permute(2, 0, 3, 1, 4)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, by_q: Tensor, by_k: Tensor, by_v: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, norms, rope, qkv, rstd = ctx.saved_tensors
        rows, heads, width = x.size(0), ctx.heads, x.size(1) // ctx.heads
        by_qkv = torch.empty_like(qkv)
        learns = norms is not None
        times = _TURN_TIMES if learns else 1
        groups = triton.cdiv(rows, _TURN_ROWS * times)
        shares = torch.empty(groups if learns else 0, 2, heads, width, dtype=torch.float32, device=x.device)
        by_q, by_k, by_v = (gradient.transpose(1, 2).contiguous() for gradient in (by_q, by_k, by_v))
        _norm_turn_backward_kernel[(3 * heads, groups)](
            by_q, by_k, by_v, qkv, rstd, norms, by_qkv, shares, rope[0], rope[1], rows, rope.size(1), LEARNS=learns,
            heads=heads, width=width, ROWS=_TURN_ROWS, TIMES=times, num_warps=4,
        )  # fmt: skip
        by_norms = shares.sum((0, 2)) if learns else None
        by_extra = by_v.transpose(1, 2) if ctx.needs_input_grad[3] else None
        return by_qkv @ weight, by_weight(by_qkv, x), by_norms, by_extra, None, None
