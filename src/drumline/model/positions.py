"""Positions and attention masks.

Shapes: B sequences, T tokens in this call, S tokens attended to (T plus those in the cache).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
