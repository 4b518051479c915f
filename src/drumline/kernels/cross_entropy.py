"""A Triton kernel that computes the cross entropy of bf16 logits and overwrites them with its gradient.

For float8 matmuls it leaves the logits unchanged and writes the gradient in float8. A row is read from memory once
(the second read hits the cache) and written once; all arithmetic is float32.
Used only by linear_cross_entropy.py, on CUDA; its plain PyTorch version is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _capped(x, softcap: tl.constexpr, FAST: tl.constexpr):
    """softcap * tanh(x / softcap)."""
    if FAST:
        return softcap * tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x * (1.0 / softcap)], dtype=tl.float32, is_pure=True, pack=1
        )
    return softcap - 2.0 * softcap / (1.0 + tl.exp2(x * (2.0 * _LOG2_E / softcap)))


@triton.jit
def _summed_above(base, top, vocab: tl.constexpr, softcap: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of exp(logit - top) over a row."""
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float32)  # reduced across the block only once, at the end
    for start in range(0, vocab, BLOCK):
        columns = start + offsets
        x = tl.load(base + columns, mask=columns < vocab, other=-float("inf"), eviction_policy="evict_last")
        x = x.to(tl.float32)
        if softcap > 0.0:
            sums += tl.where(columns < vocab, tl.exp2((_capped(x, softcap, FAST) - top) * _LOG2_E), 0.0)
        else:
            sums += tl.exp2((x - top) * _LOG2_E)
    return tl.sum(sums)


@triton.jit
def _cross_entropy_kernel(
    logits,  # bf16 (rows, vocab): read, then overwritten with the gradient unless that is float8
    float8,  # e5m2 (rows, vocab), written if FLOAT8
    targets,  # int64 (rows)
    losses,  # float32 (rows), written
    vocab: tl.constexpr,
    ignored: tl.constexpr,
    softcap: tl.constexpr,
    scale: tl.constexpr,  # multiplies the gradient
    GRADIENT: tl.constexpr,
    FLOAT8: tl.constexpr,
    FAST: tl.constexpr,  # approximate tanh with an error of up to 2^-11, the precision of bf16 logits
    BLOCK: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocab
    target = tl.load(targets + row)
    known = (target >= 0) & (target < vocab)
    # Before anything is written: another warp may be ahead of this one.
    wanted = tl.load(base + tl.where(known, target, 0)).to(tl.float32)
    if softcap > 0.0:
        wanted = _capped(wanted, softcap, FAST)
    offsets = tl.arange(0, BLOCK)
    if softcap > 0.0:
        top = softcap * 1.0  # an upper bound of capped logits
        total = _summed_above(base, top, vocab, softcap, FAST, BLOCK)
    else:
        # The maximum of the first block is enough: hardly ever is another logit so much higher that exp overflows.
        first = tl.load(base + offsets, mask=offsets < vocab, other=-float("inf"), eviction_policy="evict_last")
        top = tl.max(first.to(tl.float32))
        total = _summed_above(base, top, vocab, softcap, FAST, BLOCK)
        if not (total < float("inf")):
            tops = first.to(tl.float32)
            for start in range(BLOCK, vocab, BLOCK):
                columns = start + offsets
                x = tl.load(base + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
                tops = tl.maximum(tops, x)
            top = tl.max(tops)
            total = _summed_above(base, top, vocab, softcap, FAST, BLOCK)
    normaliser = top + tl.log(total)
    # A target outside the vocabulary gives NaN, which the loop's check of the loss will catch.
    loss = tl.where(known, normaliser - wanted, float("nan"))
    tl.store(losses + row, tl.where(target == ignored, 0.0, loss))
    if GRADIENT:
        counts = tl.where(target == ignored, 0.0, scale)
        for start in range(0, vocab, BLOCK):
            columns = start + offsets
            x = tl.load(base + columns, mask=columns < vocab, other=0.0, eviction_policy="evict_first").to(tl.float32)
            if softcap > 0.0:
                x = _capped(x, softcap, FAST)
            gradient = tl.exp2((x - normaliser) * _LOG2_E) - tl.where(columns == target, 1.0, 0.0)
            if softcap > 0.0:
                gradient *= 1.0 - (x / softcap) * (x / softcap)
            if FLOAT8:
                at = float8 + row * vocab + columns
                tl.store(at, (gradient * counts).to(tl.float8e5), mask=columns < vocab)
            else:
                tl.store(base + columns, (gradient * counts).to(tl.bfloat16), mask=columns < vocab)


def cross_entropy_in_place(logits: Tensor, targets: Tensor, *, ignored: int, softcap: float, gradient: bool) -> Tensor:
    """Each row's loss, float32 (N); with `gradient`, bf16 logits (N, V) are overwritten with their gradient."""
    return _losses(logits, None, targets, ignored=ignored, softcap=softcap, scale=1.0, gradient=gradient)


def cross_entropy_to_float8(
    logits: Tensor, targets: Tensor, *, ignored: int, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Each row's loss, float32 (N), and `scale` times the gradient of the bf16 logits, e5m2 (N, V)."""
    float8 = torch.empty_like(logits, dtype=torch.float8_e5m2)
    return _losses(logits, float8, targets, ignored=ignored, softcap=softcap, scale=scale, gradient=True), float8


def _losses(
    logits: Tensor,
    float8: Tensor | None,
    targets: Tensor,
    *,
    ignored: int,
    softcap: float,
    scale: float,
    gradient: bool,
) -> Tensor:
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy_kernel[(rows,)](
        logits,
        float8,
        targets,
        losses,
        vocab=vocab,
        ignored=ignored,
        softcap=softcap,
        scale=scale,
        GRADIENT=gradient,
        FLOAT8=float8 is not None,
        FAST=logits.is_cuda and gradient,  # evaluation uses exact arithmetic
        BLOCK=min(4096, triton.next_power_of_2(vocab)),
        num_warps=8,
    )
    return losses
