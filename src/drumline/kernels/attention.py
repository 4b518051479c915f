"""Causal attention within documents, for Hopper: blocks that lie in other documents are not computed.

Each token knows where its document begins and ends, so how many there are makes no difference to a CUDA graph. Work is
done in tiles of queries or keys, of which most need no mask: a tile's queries attend whole blocks of keys between the
latest of their documents' beginnings and the diagonal; only blocks around that need one. No sum depends on the order in
which programs run, so results repeat.

This module needs Triton, which gpt.py checks.

Shapes: B sequences of T tokens, H heads, W head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from drumline.model import starts

_LOG2_E = 1.4426950408889634
# Rows that a program owns, rows it reads at a time, stages: the fastest of some 80 on an H200, for heads of 64 and the
# documents of benchmarks/document_mask.py. Small tiles lose less at the borders of documents.
_ATTEND, _BY_QUERIES, _BY_KEYS = (64, 64, 3), (64, 64, 2), (64, 32, 3)
_NEVER = tl.constexpr(-1.0e30)
"""The score of a key that is not attended to: finite, so that a row which has none yet gives no NaN."""


def document_spans(documents: Tensor) -> Tensor:
    """Where the document of each token begins and ends within its sequence: (B, T) -> int32 (2, B, T)."""
    first, length = starts(documents), documents.size(1)
    place = torch.arange(length, device=documents.device).expand_as(first)
    begins = torch.where(first, place, 0).cummax(1).values
    # Each place's next beginning, after the last the end of the sequence: the least of those that follow.
    later = F.pad(torch.where(first, place, length)[:, 1:], (0, 1), value=length)
    ends = later.flip(1).cummin(1).values.flip(1)
    return torch.stack((begins, ends)).int()


def document_attention_reference(q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> Tensor:
    """Causal attention within documents: 3 (B, H, T, W), int32 (2, B, T) -> (B, T, H, W)."""
    place = torch.arange(q.size(2), device=q.device)
    mask = (place >= spans[0][:, :, None]) & (place <= place[:, None])  # (B, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2)


def document_attention(q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> Tensor:
    """Like the reference, for bf16 views of one buffer."""
    result: Tensor = _DocumentAttention.apply(q, k, v, spans)
    return result


@triton.jit
def _rows(x, row, step, length, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    at = row[:, None] * step + tl.arange(0, WIDTH)[None, :]
    if MASKED:
        return tl.load(x + at, mask=(row < length)[:, None], other=0.0)
    return tl.load(x + at)


@triton.jit
def _blocks_of_keys(begins, at, length, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """For a tile of queries: the first block of keys, the first that needs no mask, and how many need one."""
    last = tl.minimum(at + ROWS, length) - 1
    low = tl.load(begins + at) // KEYS
    whole = tl.minimum(tl.cdiv(tl.load(begins + last), KEYS), at // KEYS)
    return low, whole, whole - low + tl.cdiv(last + 1 - at, KEYS)


@triton.jit
def _masked_block(number, low, whole, at, KEYS: tl.constexpr):
    """Where the keys that need a mask are: blocks before the first that needs none, then those at the diagonal."""
    return tl.where(number < whole - low, (low + number) * KEYS, at + (number - (whole - low)) * KEYS)


@triton.jit
def _add_values(
    most, total, sums, queries, k, v, place, row, begin, by_token, length, scale, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    key = place + tl.arange(0, KEYS)
    keys, values = _rows(k, key, by_token, length, WIDTH, MASKED), _rows(v, key, by_token, length, WIDTH, MASKED)
    scores = tl.dot(queries, tl.trans(keys)) * scale
    if MASKED:
        scores = tl.where((key[None, :] <= row[:, None]) & (key[None, :] >= begin[:, None]), scores, _NEVER)
    above = tl.maximum(most, tl.max(scores, 1))
    shares, fade = tl.exp2(scores - above[:, None]), tl.exp2(most - above)
    return above, total * fade + tl.sum(shares, 1), tl.dot(shares.to(values.dtype), values, sums * fade[:, None])


@triton.jit
def _attend_kernel(
    q, k, v, begins, out, logsumexp, by_sequence, by_token, length, scale, heads: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one head."""
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest first
    head, sequence = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    base, begins = sequence * by_sequence + head * WIDTH, begins + sequence * length
    row = at + tl.arange(0, ROWS)
    begin = tl.load(begins + row, mask=row < length, other=0)
    queries = _rows(q + base, row, by_token, length, WIDTH, True)
    low, whole, masked = _blocks_of_keys(begins, at, length, ROWS, KEYS)
    most, total = tl.full((ROWS,), _NEVER, dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)
    sums = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for number in range(masked):
        place = _masked_block(number, low, whole, at, KEYS)
        most, total, sums = _add_values(
            most, total, sums, queries, k + base, v + base, place, row, begin, by_token, length, scale, WIDTH, KEYS,
            True,
        )  # fmt: skip
    for number in range(whole, at // KEYS):
        most, total, sums = _add_values(
            most, total, sums, queries, k + base, v + base, number * KEYS, row, begin, by_token, length, scale, WIDTH,
            KEYS, False,
        )  # fmt: skip
    inside, token = row < length, sequence * length + row
    to = (token * heads + head)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + to, sums / total[:, None], mask=inside[:, None])
    tl.store(logsumexp + (sequence * heads + head) * length + row, most + tl.log2(total), mask=inside)


@triton.jit
def _add_by_queries(
    by_q, queries, by_outs, normal, dots, k, v, place, row, begin, by_token, length, scale, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    key = place + tl.arange(0, KEYS)
    keys, values = _rows(k, key, by_token, length, WIDTH, MASKED), _rows(v, key, by_token, length, WIDTH, MASKED)
    shares = tl.exp2(tl.dot(queries, tl.trans(keys)) * scale - normal[:, None])
    if MASKED:
        shares = tl.where((key[None, :] <= row[:, None]) & (key[None, :] >= begin[:, None]), shares, 0.0)
    by_scores = shares * (tl.dot(by_outs, tl.trans(values)) - dots[:, None])
    return tl.dot(by_scores.to(keys.dtype), keys, by_q)


@triton.jit
def _by_queries_kernel(
    q, k, v, begins, out, by_out, logsumexp, dots_out, by_queries, by_sequence, by_token, length, scale, natural,
    heads: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of ROWS queries of one head, and their products of output and its gradient."""
    at = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head, sequence = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    base, begins = sequence * by_sequence + head * WIDTH, begins + sequence * length
    own = (sequence * length * heads + head) * WIDTH
    row = at + tl.arange(0, ROWS)
    inside = row < length
    begin = tl.load(begins + row, mask=inside, other=0)
    numbers = (sequence * heads + head) * length + row
    normal = tl.load(logsumexp + numbers, mask=inside, other=0.0)
    queries = _rows(q + base, row, by_token, length, WIDTH, True)
    outs = _rows(out + own, row, heads * WIDTH, length, WIDTH, True)
    by_outs = _rows(by_out + own, row, heads * WIDTH, length, WIDTH, True)
    dots = tl.sum(outs.to(tl.float32) * by_outs.to(tl.float32), 1)
    tl.store(dots_out + numbers, dots, mask=inside)
    low, whole, masked = _blocks_of_keys(begins, at, length, ROWS, KEYS)
    by_q = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for number in range(masked):
        place = _masked_block(number, low, whole, at, KEYS)
        by_q = _add_by_queries(
            by_q, queries, by_outs, normal, dots, k + base, v + base, place, row, begin, by_token, length, scale,
            WIDTH, KEYS, True,
        )  # fmt: skip
    for number in range(whole, at // KEYS):
        by_q = _add_by_queries(
            by_q, queries, by_outs, normal, dots, k + base, v + base, number * KEYS, row, begin, by_token, length,
            scale, WIDTH, KEYS, False,
        )  # fmt: skip
    to = row[:, None] * (heads * WIDTH) + tl.arange(0, WIDTH)[None, :]
    tl.store(by_queries + own + to, by_q * natural, mask=inside[:, None])


@triton.jit
def _add_by_keys(
    by_k, by_v, keys, values, q, by_out, logsumexp, dots, place, key, end, by_token, step, length, scale,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = place + tl.arange(0, ROWS)
    queries, by_outs = _rows(q, row, by_token, length, WIDTH, MASKED), _rows(by_out, row, step, length, WIDTH, MASKED)
    if MASKED:
        normal = tl.load(logsumexp + row, mask=row < length, other=0.0)
        dot = tl.load(dots + row, mask=row < length, other=0.0)
    else:
        normal, dot = tl.load(logsumexp + row), tl.load(dots + row)
    shares = tl.exp2(tl.dot(keys, tl.trans(queries)) * scale - normal[None, :])
    if MASKED:
        shares = tl.where((key[:, None] <= row[None, :]) & (end[:, None] > row[None, :]), shares, 0.0)
    by_v = tl.dot(shares.to(by_outs.dtype), by_outs, by_v)
    by_scores = shares * (tl.dot(values, tl.trans(by_outs)) - dot[None, :])
    return tl.dot(by_scores.to(queries.dtype), queries, by_k), by_v


@triton.jit
def _by_keys_kernel(
    q, k, v, ends, by_out, logsumexp, dots, by_keys, by_values, by_sequence, by_token, length, scale, natural,
    heads: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program: the gradients of KEYS keys of one head, and of their values."""
    at = tl.program_id(0) * KEYS
    head, sequence = tl.program_id(1) % heads, (tl.program_id(1) // heads).to(tl.int64)
    base, ends = sequence * by_sequence + head * WIDTH, ends + sequence * length
    own, numbers = (sequence * length * heads + head) * WIDTH, (sequence * heads + head) * length
    key = at + tl.arange(0, KEYS)
    inside = key < length
    end = tl.load(ends + key, mask=inside, other=0)
    keys = _rows(k + base, key, by_token, length, WIDTH, True)
    values = _rows(v + base, key, by_token, length, WIDTH, True)
    last = tl.minimum(at + KEYS, length) - 1
    at_diagonal, first = tl.cdiv(last + 1 - at, ROWS), (at + KEYS) // ROWS
    whole = tl.maximum(tl.load(ends + at) // ROWS, first)
    masked = at_diagonal + tl.maximum(tl.cdiv(tl.load(ends + last), ROWS) - whole, 0)
    by_k, by_v = tl.zeros((KEYS, WIDTH), dtype=tl.float32), tl.zeros((KEYS, WIDTH), dtype=tl.float32)
    for number in range(masked):
        place = tl.where(number < at_diagonal, at + number * ROWS, (whole + number - at_diagonal) * ROWS)
        by_k, by_v = _add_by_keys(
            by_k, by_v, keys, values, q + base, by_out + own, logsumexp + numbers, dots + numbers, place, key, end,
            by_token, heads * WIDTH, length, scale, WIDTH, ROWS, True,
        )  # fmt: skip
    for number in range(first, whole):
        by_k, by_v = _add_by_keys(
            by_k, by_v, keys, values, q + base, by_out + own, logsumexp + numbers, dots + numbers, number * ROWS, key,
            end, by_token, heads * WIDTH, length, scale, WIDTH, ROWS, False,
        )  # fmt: skip
    to = own + key[:, None] * (heads * WIDTH) + tl.arange(0, WIDTH)[None, :]
    tl.store(by_keys + to, by_k * natural, mask=inside[:, None])
    tl.store(by_values + to, by_v, mask=inside[:, None])


def _warps(width: int) -> int:
    """Wide heads take twice as many threads, so that sums stay in registers."""
    return 4 if width <= 128 else 8


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Tensor) -> Tensor:
        sequences, heads, length, width = q.shape
        out = torch.empty(sequences, length, heads, width, dtype=q.dtype, device=q.device)
        logsumexp = torch.empty(sequences, heads, length, dtype=torch.float32, device=q.device)
        rows, keys, stages = _ATTEND
        _attend_kernel[(triton.cdiv(length, rows), sequences * heads)](
            q, k, v, spans[0], out, logsumexp, q.stride(0), q.stride(2), length, _LOG2_E * width**-0.5, heads=heads,
            WIDTH=width, ROWS=rows, KEYS=keys, num_warps=_warps(width), num_stages=stages,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, spans, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, spans, out, logsumexp = ctx.saved_tensors
        sequences, heads, length, width = q.shape
        by_out, dots = by_out.contiguous(), torch.empty_like(logsumexp)
        by_q, by_k, by_v = (torch.empty_like(out) for _ in range(3))
        strides, scales = (q.stride(0), q.stride(2)), (_LOG2_E * width**-0.5, width**-0.5)
        rows, keys, stages = _BY_QUERIES
        _by_queries_kernel[(triton.cdiv(length, rows), sequences * heads)](
            q, k, v, spans[0], out, by_out, logsumexp, dots, by_q, *strides, length, *scales, heads=heads, WIDTH=width,
            ROWS=rows, KEYS=keys, num_warps=_warps(width), num_stages=stages,
        )  # fmt: skip
        keys, rows, stages = _BY_KEYS
        _by_keys_kernel[(triton.cdiv(length, keys), sequences * heads)](
            q, k, v, spans[1], by_out, logsumexp, dots, by_k, by_v, *strides, length, *scales, heads=heads, WIDTH=width,
            ROWS=rows, KEYS=keys, num_warps=_warps(width), num_stages=stages,
        )  # fmt: skip
        return by_q.transpose(1, 2), by_k.transpose(1, 2), by_v.transpose(1, 2), None
