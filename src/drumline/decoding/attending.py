"""Attention of one new token of each text to its cache, in Triton: the token's key and value are normalized, rotated
and stored by the same kernel that attends to them.

It reads as many positions as a text has, however long others are.

Shapes: B texts, N slots, H heads, K key/value heads, P positions, W head width, S pieces of a text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from drumline.model import rotate

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """How the work is divided: with fewer programs than these, each text is read in pieces."""

    programs: int = 256
    least: int = 64
    """Positions of a piece."""
    block: int = 64
    warps: int = 4
    stages: int = 3


def pieces_for(programs: int) -> Pieces:
    """The fastest on an H200 of those that benchmarks/generation_kernels.py tries. programs: of whole texts"""
    return Pieces() if programs < Pieces.programs else Pieces(block=32, warps=2)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer. norm_eps: None for none; table: value embeddings; rope: (2, P, W / 2)"""

    cache: Tensor
    """(2, N, K, P, W)"""
    heads: int
    norm_eps: float | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    rope: Tensor | None
    table: Tensor | None


def attend_reference(qkv: Tensor, layer: Attention, *, lengths: Tensor, ids: Tensor) -> Tensor:
    """(B, (H + 2 K) W), int64 (B), int64 (B) -> (B, H W); the new keys and values are in the cache afterwards."""
    kv_heads, width = layer.cache.size(2), layer.cache.size(4)
    q, k, v = qkv.float().view(len(qkv), -1, width).split((layer.heads, kv_heads, kv_heads), dim=1)  # (B, _, W)
    if layer.norm_eps is not None:
        q, k = (F.rms_norm(each, (width,), eps=layer.norm_eps) for each in (q, k))
    if layer.query_norm is not None and layer.key_norm is not None:
        q, k = q * layer.query_norm, k * layer.key_norm
    if layer.rope is not None:
        q, k = (rotate(each, layer.rope[:, lengths, None]) for each in (q, k))
    if layer.table is not None:
        v = v + layer.table[ids].view(len(ids), kv_heads, width)
    texts = torch.arange(len(qkv), device=qkv.device)
    for part, new in zip(layer.cache, (k, v), strict=True):
        part[texts, :, lengths] = new.type_as(part)
    keys, values = layer.cache[:, : len(qkv)].float()
    mask = (torch.arange(keys.size(2), device=qkv.device) <= lengths[:, None])[:, None, None]
    y = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)
    return y.flatten(1).type_as(qkv)


def attend(
    qkv: Tensor,
    layer: Attention,
    out: Tensor,
    *,
    lengths: Tensor,
    ids: Tensor,
    positions: int,
    pieces: Pieces | None = None,
) -> Tensor:
    """Like the reference, written to `out`. positions: at least as many as the longest text has with its new token"""
    _, _, kv_heads, most, width = layer.cache.shape
    texts, group = len(qkv), layer.heads // kv_heads
    pieces = pieces or pieces_for(texts * kv_heads)
    wanted = max(1, min(pieces.programs // (texts * kv_heads), positions // pieces.least))
    splits = triton.next_power_of_2(wanted) if wanted == 1 else triton.next_power_of_2(wanted + 1) // 2
    shape = (texts, layer.heads, splits)
    sums = qkv.new_empty((*shape, width) if splits > 1 else 0, dtype=torch.float32)
    scales = qkv.new_empty((*shape, 2) if splits > 1 else 0, dtype=torch.float32)
    _attend_kernel[(texts, kv_heads, splits)](
        qkv, layer.cache[0], layer.cache[1], lengths, ids, layer.table, layer.query_norm, layer.key_norm, layer.rope,
        out, sums, scales, most, layer.norm_eps or 0.0, _LOG2_E / width**0.5, splits, -(-positions // splits),
        HEADS=layer.heads, KV_HEADS=kv_heads, WIDTH=width, GROUP=group, NORM=layer.norm_eps is not None,
        LEARNS=layer.query_norm is not None, ROTATES=layer.rope is not None, HAS_TABLE=layer.table is not None,
        ROWS=max(16, triton.next_power_of_2(group)), BLOCK=pieces.block, SPLIT=splits > 1,
        num_warps=pieces.warps, num_stages=pieces.stages,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(texts * layer.heads,)](sums, scales, out, WIDTH=width, SPLITS=splits, num_warps=2)
    return out


@triton.jit
def _by(x1, x2, learned):
    """Halves of vectors (_, W / 2), times the weights of a norm."""
    half: tl.constexpr = x1.shape[len(x1.shape) - 1]
    at = learned + tl.arange(0, half)
    return x1 * tl.load(at).to(tl.float32), x2 * tl.load(at + half).to(tl.float32)


@triton.jit
def _attended(
    q1, q2, keys, values, begin, end, scale, highest, weight, total, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Positions of the cache, added to the sums so far."""
    low, whole = tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH)
    half: tl.constexpr = WIDTH // 2
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        there = (place < end)[:, None]
        of_keys = keys + place[:, None] * WIDTH + low[None, :]
        old1 = tl.load(of_keys, mask=there, other=0.0)
        old2 = tl.load(of_keys + half, mask=there, other=0.0)
        score = tl.dot(q1, tl.trans(old1), input_precision="ieee")
        score = tl.dot(q2, tl.trans(old2), score, input_precision="ieee") * scale
        score = tl.where((place < end)[None, :], score, -1.0e30)
        higher = tl.maximum(highest, tl.max(score, axis=1))
        shrunk = tl.exp2(highest - higher)
        share = tl.exp2(score - higher[:, None])
        weight = weight * shrunk + tl.sum(share, axis=1)
        old = tl.load(values + place[:, None] * WIDTH + whole[None, :], mask=there, other=0.0)
        total = tl.dot(share.to(q1.dtype), old, total * shrunk[:, None], input_precision="ieee")
        highest = higher
    return highest, weight, total


@triton.jit(do_not_specialize=["splits", "piece"])  # compiled once for all lengths
def _attend_kernel(
    qkv, keys, values, lengths, ids, table, query_norm, key_norm, rope, out, sums, scales, most, eps, scale, splits,
    piece, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr,
    LEARNS: tl.constexpr, ROTATES: tl.constexpr, HAS_TABLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One program: a piece of one text, in one key/value head, for the GROUP query heads that use it."""
    text, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = WIDTH // 2
    dtype = keys.dtype.element_ty
    length = tl.minimum(tl.load(lengths + text), most - 1).to(tl.int32)
    query = tl.arange(0, ROWS)
    low, whole = tl.arange(0, half), tl.arange(0, WIDTH)
    own = qkv + text * ((HEADS + 2 * KV_HEADS) * WIDTH)
    at = own + (head * GROUP + query)[:, None] * WIDTH + low[None, :]
    inside = (query < GROUP)[:, None]
    q1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    q2 = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    k1 = tl.load(own + (HEADS + head) * WIDTH + low).to(tl.float32)
    k2 = tl.load(own + (HEADS + head) * WIDTH + half + low).to(tl.float32)
    if NORM:
        of_q = tl.rsqrt(tl.sum(q1 * q1 + q2 * q2, axis=1) / WIDTH + eps)[:, None]
        of_k = tl.rsqrt(tl.sum(k1 * k1 + k2 * k2, axis=0) / WIDTH + eps)
        q1, q2, k1, k2 = q1 * of_q, q2 * of_q, k1 * of_k, k2 * of_k
        if LEARNS:
            q1, q2 = _by(q1, q2, query_norm)
            k1, k2 = _by(k1, k2, key_norm)
    if ROTATES:
        cos = tl.load(rope + length * half + low)
        sin = tl.load(rope + (most + length) * half + low)
        q1, q2 = q1 * cos[None, :] - q2 * sin[None, :], q2 * cos[None, :] + q1 * sin[None, :]
        k1, k2 = k1 * cos - k2 * sin, k2 * cos + k1 * sin
    v = tl.load(own + (HEADS + KV_HEADS + head) * WIDTH + whole).to(tl.float32)
    if HAS_TABLE:
        v += tl.load(table + (tl.load(ids + text) * KV_HEADS + head) * WIDTH + whole).to(tl.float32)
    q1, q2, k1, k2, v = q1.to(dtype), q2.to(dtype), k1.to(dtype), k2.to(dtype), v.to(dtype)
    base = (text * KV_HEADS + head).to(tl.int64) * most * WIDTH
    if split == 0:
        tl.store(keys + base + length * WIDTH + low, k1)
        tl.store(keys + base + length * WIDTH + half + low, k2)
        tl.store(values + base + length * WIDTH + whole, v)
    # The first piece has the new token, whose key and value others may not see in the cache yet.
    key1, key2 = k1.to(tl.float32)[None, :], k2.to(tl.float32)[None, :]
    new = tl.sum(q1.to(tl.float32) * key1 + q2.to(tl.float32) * key2, axis=1)
    first = tl.where(split == 0, 1.0, 0.0)
    highest = tl.where(split == 0, new * scale, -1.0e30)
    weight = tl.zeros((ROWS,), dtype=tl.float32) + first
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32) + first * v.to(tl.float32)[None, :]
    begin, end = split * piece, tl.minimum(split * piece + piece, length)
    highest, weight, total = _attended(
        q1, q2, keys + base, values + base, begin, end, scale, highest, weight, total, WIDTH, BLOCK
    )
    row = text * HEADS + head * GROUP + query
    if not SPLIT:
        tl.store(out + row[:, None] * WIDTH + whole[None, :], (total / weight[:, None]).to(dtype), mask=inside)
    else:
        row = row * splits + split
        tl.store(sums + row[:, None] * WIDTH + whole[None, :], total, mask=inside)
        tl.store(scales + row * 2, highest, mask=query < GROUP)
        tl.store(scales + row * 2 + 1, weight, mask=query < GROUP)


@triton.jit
def _combine_kernel(sums, scales, out, WIDTH: tl.constexpr, SPLITS: tl.constexpr):
    """One program: the pieces of one head of a text."""
    row = tl.program_id(0)
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    highest = tl.load(scales + (row * SPLITS + split) * 2)
    weight = tl.load(scales + (row * SPLITS + split) * 2 + 1)
    share = tl.exp2(highest - tl.max(highest, axis=0))
    total = tl.load(sums + (row * SPLITS + split)[:, None] * WIDTH + column[None, :])
    value = tl.sum(total * share[:, None], axis=0) / tl.sum(weight * share, axis=0)
    tl.store(out + row * WIDTH + column, value.to(out.dtype.element_ty))
