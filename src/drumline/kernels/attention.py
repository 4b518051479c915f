"""Attention on Hopper: which of torch's kernels is used, and attention within documents."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from drumline.model import starts
from drumline.parallel import is_hopper

# The first that can do what is asked: cuDNN's is the fastest, and stands back where bits must repeat.
_IN_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Inside, attention is computed by the fastest kernel that can; elsewhere than on Hopper torch itself knows it."""
    return sdpa_kernel(_IN_ORDER, set_priority=True) if is_hopper(device) else nullcontext()


_SPARE = 1.25
"""Space for more documents than in a micro-batch, so that the next one fits too."""


def documents_in(documents: Tensor) -> int:
    """How many there are in (B, T); on a device, this waits for it."""
    return int(starts(documents).sum())


def space_for(count: int) -> int:
    """A number of documents, not less than `count`, that changes rarely: a CUDA graph is captured for it."""
    return 1 << max(3, int(count * _SPARE - 1).bit_length())


def document_bounds(documents: Tensor, *, space: int) -> Tensor:
    """Where each document begins, and where the last ends, in tokens: (B, T) -> int32 (space + 1).

    Of a fixed size, without a word to the host. What is left of the space is empty documents at the end. There must be
    at most `space` documents.
    """
    first = starts(documents).flatten()  # (N), also at the start of each sequence
    places = torch.arange(first.numel(), device=first.device)
    slots = torch.where(first, first.cumsum(0) - 1, space)
    bounds = torch.full((space + 1,), first.numel(), dtype=torch.int64, device=first.device)
    bounds = bounds.scatter(0, slots, places)
    bounds[space:].fill_(first.numel())
    return bounds.int()


def document_attention_reference(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Causal attention within documents, one after the other: 3 (B, H, T, W), int32 (S + 1) -> (B, T, H, W)."""
    places = torch.arange(q.size(0) * q.size(2), dtype=bounds.dtype, device=q.device).view(q.size(0), -1)  # (B, T)
    document = torch.bucketize(places, bounds, right=True)
    mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]  # (B, 1, T, T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def document_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Like the reference; on a GPU, by attention of variable length, which skips what the mask would remove."""
    if not q.is_cuda:
        return document_attention_reference(q, k, v, bounds)
    result: Tensor = _DocumentAttention.apply(q, k, v, bounds)  # type: ignore[no-untyped-call]
    return result


class _DocumentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        length = q.size(2)
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))  # 3 x (N, H, W), views of one buffer
        out, logsumexp, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, length, length, 0.0, True, False
        )
        ctx.save_for_backward(q, k, v, out, logsumexp, bounds, state, unused)
        ctx.length = length
        attended: Tensor = out.unflatten(0, (-1, length))
        return attended

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, bounds, state, unused = ctx.saved_tensors
        gradients = torch.ops.aten._flash_attention_backward(
            gradient.flatten(0, 1).contiguous(), q, k, v, out, logsumexp, bounds, bounds, ctx.length, ctx.length, 0.0,
            True, state, unused,
        )  # fmt: skip
        by_q, by_k, by_v = (each.unflatten(0, (-1, ctx.length)).transpose(1, 2) for each in gradients)
        return by_q, by_k, by_v, None
