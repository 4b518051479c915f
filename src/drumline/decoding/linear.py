"""A matrix times the few rows of a step, with the norm before it and what follows in the same Triton kernel.

A step reads each weight once, and its time is that of reading them and of launching kernels: so there are few kernels.

Shapes: B rows, K columns of the input, N of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

Activation = Literal["none", "gelu", "gelu_exact", "swiglu", "relu2"]
_ACTIVATIONS = {"none": 0, "gelu": 1, "gelu_exact": 2, "swiglu": 3, "relu2": 4}


@dataclass(frozen=True, kw_only=True)
class Linear:
    """What is computed of rows x: activation(norm(x) @ weight.T + bias), capped, or added to other rows."""

    weight: Tensor
    """(N, K)"""
    gate: Tensor | None = None
    """(N, K), of swiglu."""
    bias: Tensor | None = None
    """float32 (N); with `means`, that of the norm is in it, through the weight."""
    norm: Tensor | None = None
    """(K), the learned weights of the norm."""
    means: Tensor | None = None
    """float32 (N), of LayerNorm: what a row's mean adds to the output. None: RMSNorm."""
    eps: float | None = None
    """Of the norm. None: there is none."""
    activation: Activation = "none"
    softcap: float = 0.0


def linear_reference(x: Tensor, layer: Linear, *, residual: Tensor | None = None) -> Tensor:
    """(B, K), (B, N) or None -> (B, N)"""
    x, learned = x.float(), 1.0 if layer.norm is None else layer.norm.float()
    weight, shift = layer.weight.float(), 0.0
    if layer.eps is not None:
        mean = 0.0 if layer.means is None else x.mean(dim=1, keepdim=True)
        spread = ((x - mean).square().mean(dim=1, keepdim=True) + layer.eps).rsqrt()
        x = (x - mean) * spread * learned
    y = F.linear(x, weight) + (shift if layer.bias is None else layer.bias)
    if layer.activation == "swiglu":
        assert layer.gate is not None
        y = F.silu(F.linear(x, layer.gate.float())) * y
    elif layer.activation == "relu2":
        y = F.relu(y).square()
    elif layer.activation != "none":
        y = F.gelu(y, approximate="tanh" if layer.activation == "gelu" else "none")
    if layer.softcap:
        y = layer.softcap * torch.tanh(y / layer.softcap)
    return y if residual is None else y + residual.float()


_FEW, _MANY = 1536, 16384
"""Outputs: up to so many, as of a layer's last matrices, tiles are narrow; above so many, as of a head, wide."""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is divided: of the output, a program computes a tile of rows x columns, in pieces of the depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles_for(rows: int, outputs: int, depth: int) -> Tiles:
    """Small tiles, so that there are enough programs to keep memory busy: the fastest on an H200 of those that
    benchmarks/generation_kernels.py tries, for rows times a matrix (outputs, depth)."""
    few = rows <= 16
    if outputs > _MANY:
        depth, warps, stages = (128, 2, 3) if few else (64, 4, 3)
    elif outputs > _FEW:
        depth, warps, stages = (256, 2, 3) if few else (64, 4, 5)
    elif few:
        depth, warps, stages = (512, 4, 3) if depth > _FEW else (256, 2, 5)
    else:
        depth, warps, stages = 128, 4, 5
    columns = 128 if outputs > _MANY else 32 if outputs > _FEW else 16
    return Tiles(rows=16 if few else 64, columns=columns, depth=depth, warps=warps, stages=stages)


def linear(
    x: Tensor, layer: Linear, out: Tensor, *, residual: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """Like the reference, written to `out`, in its dtype; x and weights have one dtype."""
    (rows, columns), outputs = x.shape, layer.weight.size(0)
    tiles = tiles or tiles_for(rows, outputs, columns)
    depth = min(tiles.depth, triton.next_power_of_2(columns))
    norm = 0 if layer.eps is None else 1 if layer.means is None else 2
    _linear_kernel[(triton.cdiv(outputs, tiles.columns), triton.cdiv(rows, tiles.rows))](
        x, layer.weight, layer.gate, layer.bias, layer.norm, layer.means, residual, out, rows, outputs, columns,
        layer.eps or 0.0, layer.softcap, NORM=norm, LEARNS=layer.norm is not None, HAS_BIAS=layer.bias is not None,
        HAS_RESIDUAL=residual is not None, ACTIVATION=_ACTIVATIONS[layer.activation], CAPPED=layer.softcap > 0.0,
        EVEN=columns % depth == 0, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=depth, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return out


@triton.jit
def _activated(total, gates, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        total *= tl.sigmoid(1.5957691216057308 * (total + 0.044715 * total * total * total))
    if ACTIVATION == 2:
        total *= 0.5 * (1.0 + tl.erf(total * 0.7071067811865476))
    if ACTIVATION == 3:
        total *= gates * tl.sigmoid(gates)
    if ACTIVATION == 4:
        total = tl.where(total > 0.0, total * total, 0.0)
    return total


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, gate, bias, learned, means, residual, out, rows, outputs, columns, eps, softcap, NORM: tl.constexpr,
    LEARNS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    CAPPED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One program: a tile of ROWS x COLUMNS of the output. The norm's factor of a row is computed on the way."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    gates = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    of_x = (row < rows)[:, None]
    of_weight = (output < outputs)[:, None]
    at = output.to(tl.int64)[:, None] * columns
    for start in range(0, columns, DEPTH):
        k = start + tl.arange(0, DEPTH)
        inside_x, inside = of_x, of_weight
        if not EVEN:
            inside_x = of_x & (k < columns)[None, :]
            inside = of_weight & (k < columns)[None, :]
        part = tl.load(x + row[:, None] * columns + k[None, :], mask=inside_x, other=0.0)
        matrix = tl.load(weight + at + k[None, :], mask=inside, other=0.0)
        if NORM > 0:
            value = part.to(tl.float32)
            squares += tl.sum(value * value, axis=1)
            if NORM == 2:
                sums += tl.sum(value, axis=1)
            if LEARNS:
                value *= tl.load(learned + k, mask=k < columns, other=0.0).to(tl.float32)[None, :]
                part = value.to(part.dtype)
        total = tl.dot(part, tl.trans(matrix), total, input_precision="ieee")
        if ACTIVATION == 3:
            more = tl.load(gate + at + k[None, :], mask=inside, other=0.0)
            gates = tl.dot(part, tl.trans(more), gates, input_precision="ieee")
    if NORM == 1:
        factor = tl.rsqrt(squares / columns + eps)
        total *= factor[:, None]
        gates *= factor[:, None]
    if NORM == 2:
        mean = sums / columns
        factor = tl.rsqrt(squares / columns - mean * mean + eps)
        shift = tl.load(means + output, mask=output < outputs, other=0.0)
        total = (total - mean[:, None] * shift[None, :]) * factor[:, None]
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0)[None, :]
    total = _activated(total, gates, ACTIVATION)
    if CAPPED:
        total = softcap * (2.0 * tl.sigmoid(2.0 * total / softcap) - 1.0)
    to = row.to(tl.int64)[:, None] * outputs + output[None, :]
    whole = of_x & (output < outputs)[None, :]
    if HAS_RESIDUAL:
        # Rounded before it is added, as in a model that computes both in turn.
        total = total.to(x.dtype.element_ty).to(tl.float32)
        total += tl.load(residual + to, mask=whole, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=whole)
