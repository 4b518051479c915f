"""Checksums that a GPU computes at the speed of its memory: a thousand times sooner than a core of the host.

A piece is a square of 32-bit words. Its rows are summed, and its columns, modulo 2**32; of both lists of sums, the sum
is kept, and the sum with their positions as weights. Any one or two bits that have another value change one of the
four: two that cancel out in a row do not in their columns. So does, but for a tiny chance, anything else.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE_BYTES = 16 << 20
_AT_ONCE = 4
"""Pieces per call of what comes from elsewhere: more take more memory on the device."""


def sums(data: Tensor, device: torch.device) -> Tensor:
    """int64 (pieces, 4) on the device, of uint8 data that may be on another one; without waiting for the result."""
    at_once = _AT_ONCE * PIECE_BYTES if data.device != device else max(1, data.numel())
    parts = [_sums(part.to(device, non_blocking=True)) for part in torch.split(data, at_once) if part.numel()]
    return torch.cat(parts) if parts else torch.empty(0, 4, dtype=torch.int64, device=device)


def _sums(data: Tensor) -> Tensor:
    whole = data.numel() // PIECE_BYTES * PIECE_BYTES
    parts = [_of_pieces(data[:whole])] if whole else []
    if whole < data.numel():
        parts.append(_of_pieces(F.pad(data[whole:], (0, PIECE_BYTES - data.numel() + whole))))
    return torch.cat(parts)


def _of_pieces(data: Tensor) -> Tensor:
    side = math.isqrt(PIECE_BYTES // 4)
    words = data.view(torch.int32).view(-1, side, side)
    weights = torch.arange(1, side + 1, dtype=torch.int64, device=data.device)
    # In the type of the words: to sum them in another one, torch would first make a copy of all of them.
    both = [words.sum(dim, dtype=torch.int32).long() for dim in (2, 1)]
    return torch.stack([total for each in both for total in (each.sum(1), (each * weights).sum(1))], dim=1)
