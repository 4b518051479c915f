"""Positions, rotary embeddings, and attention masks.

Shapes: B sequences, T tokens in this call, S tokens attended to (T plus those in the cache), D width of the residual
stream, W head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.config import GPTConfig


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


def merge_documents(attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """Document ids (B, T): tokens with different ids must not attend to each other.

    Padding is a document of its own: no token attends to it, and it attends to itself, so that no softmax is empty.
    """
    if attention_mask is None or document_ids is None:
        return document_ids if attention_mask is None else attention_mask
    return 2 * document_ids + (attention_mask == 0)


def positions(input_ids: Tensor, documents: Tensor | None, *, past: int) -> Tensor:
    """Position of each token in its document: int64 (T), or (B, T) with documents."""
    places = torch.arange(past, past + input_ids.size(1), device=input_ids.device)  # (T)
    if documents is None:
        return places
    return places - torch.where(starts(documents), places, 0).cummax(dim=1).values


def starts(documents: Tensor) -> Tensor:
    """Whether a token is the first of its document: bool (B, T)."""
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)


def one_before(x: Tensor, documents: Tensor | None, *, last: Tensor | None) -> Tensor:
    """Shift by one token, with zeros before the first of a sequence or document: (B, T, D) -> (B, T, D).

    last: (B, 1, D), from the previous call
    """
    before = torch.cat((torch.zeros_like(x[:, :1]) if last is None else last, x[:, :-1]), dim=1)
    return before if documents is None else before.masked_fill(starts(documents).unsqueeze(2), 0.0)


def attention_mask_for(documents: Tensor | None, length: int, *, past: int, device: torch.device) -> Tensor | None:
    """Attention mask, True where a query may attend: (B, 1, T, T) for documents, (T, past + T) for several new tokens.

    None if plain causal attention is enough, which has faster kernels.
    """
    if documents is not None:
        same = documents[:, :, None] == documents[:, None, :]  # (B, T, T)
        return same.tril()[:, None]
    if past and length > 1:
        return torch.ones(length, past + length, dtype=torch.bool, device=device).tril(past)
    return None
