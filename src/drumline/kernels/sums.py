"""A Triton kernel for the checksums of snapshots: reads memory once, at the speed of a GPU's own copies.

snapshots/sums.py has the plain PyTorch version.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _sums_kernel(words, results, count, BLOCK: tl.constexpr):
    """One program: the sum of BLOCK words, and the sum with their positions there, from 1, as weights."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    place = program * BLOCK + at
    word = tl.load(words + place, mask=place < count, other=0).to(tl.int64)
    tl.store(results + 2 * program, tl.sum(word))
    tl.store(results + 2 * program + 1, tl.sum(word * (at + 1)))


def piece_sums(data: Tensor, *, piece_bytes: int) -> Tensor:
    """int64 (pieces, 2) of uint8 data: of every piece, the sum of its 32-bit words, and with their positions.

    piece_bytes: a power of 2
    """
    words, count = data.view(torch.int32), data.numel() // 4
    block = min(_BLOCK, piece_bytes // 4)
    each = piece_bytes // 4 // block  # programs per piece
    programs = -(-count // block)
    results = torch.empty(programs, 2, dtype=torch.int64, device=data.device)
    _sums_kernel[(programs,)](words, results, count, BLOCK=block, num_warps=8)
    total, weighted = F.pad(results, (0, 0, 0, -programs % each)).view(-1, each, 2).unbind(2)
    before = torch.arange(each, device=data.device) * block  # words of the piece before those of a program
    return torch.stack((total.sum(1), (weighted + total * before).sum(1)), dim=1)
