"""What only modern models have: rotary positions, and embeddings that have a share of the one before.

Shapes: B sequences, T tokens in this call, D width of the residual stream, W head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drumline.config import GPTConfig
from drumline.model.positions import starts


def rope_table(config: GPTConfig) -> Tensor:
    """Cosines and sines of the rotary angles: float32 (2, positions, W / 2), on the CPU: a GPU rounds otherwise."""
    pairs = torch.arange(0, config.head_width, 2, dtype=torch.float32, device="cpu")  # (W / 2)
    turns_per_token = 1.0 / (config.rope_theta or 10_000.0) ** (pairs / config.head_width)
    places = torch.arange(config.max_position_embeddings, dtype=torch.float32, device="cpu")
    angles = torch.outer(places, turns_per_token)  # (positions, W / 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Apply rotary embeddings to pairs (i, i + W / 2), as in Llama: (..., T, W)."""
    cos, sin = rope  # 2 x (T, W / 2)
    first, second = x.chunk(2, dim=-1)  # 2 x (..., T, W / 2)
    # A bfloat16 x is rotated in float32: its 8 bits of precision would blur distant positions.
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def one_before(x: Tensor, documents: Tensor | None, *, last: Tensor | None) -> Tensor:
    """Shift by one token, with zeros before the first of a sequence or document: (B, T, D) -> (B, T, D).

    last: (B, 1, D), from the previous call
    """
    before = torch.cat((torch.zeros_like(x[:, :1]) if last is None else last, x[:, :-1]), dim=1)
    return before if documents is None else before.masked_fill(starts(documents).unsqueeze(2), 0.0)
