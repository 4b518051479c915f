"""Fills tensors from what all ranks can read: each from its own disk and memory, what is not there from other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from drumline.parallel import World, waiting_for
from drumline.pieces.planning import Transfer, overlap, transfers
from drumline.pieces.rows import Range, local_part, rows_by_rank
from drumline.pieces.stored import Stored

_AT_ONCE_BYTES = 64 << 20
"""Of a transfer: no rank needs more memory than that beside its own rows."""
Here = Sequence[Mapping[str, Sequence[Range]]]
"""The rows of each tensor that each rank can read."""


def fill_own(tensors: Mapping[str, Tensor], stored: Stored, world: World) -> None:
    """Fill those of this rank's rows of the tensors that it can read itself."""
    there = stored.rows()
    with torch.no_grad():
        for name, tensor in tensors.items():
            need, own = rows_by_rank(tensor, world.size)[world.rank], local_part(tensor)
            for piece in there.get(name, ()):
                first, last = overlap(piece, need)
                if first < last:
                    stored.fill(name, _rows(own, first - need[0], last - need[0]), first)


def exchange(tensors: Mapping[str, Tensor], stored: Stored, here: Here, world: World) -> None:
    """Fill the other ones from those of other ranks; all ranks call it. ValueError, on all of them: nobody has some."""
    needs = {name: rows_by_rank(tensor, world.size) for name, tensor in tensors.items()}
    plan = list(transfers(needs, here))
    with waiting_for("the shards of the other ranks"), torch.no_grad():
        for each in plan:
            if world.rank in (each.source, each.target):
                _move(each, local_part(tensors[each.name]), needs[each.name][each.target][0], stored, world)


def _move(each: Transfer, own: Tensor, start: int, stored: Stored, world: World) -> None:
    """start: the first row of the one who receives"""
    row_bytes = max(1, own.element_size() * torch.Size(own.shape[1:]).numel())
    rows = max(1, _AT_ONCE_BYTES // row_bytes)
    for first in range(each.start, each.stop, rows):
        last = min(each.stop, first + rows)
        shape = (last - first, *own.shape[1:]) if own.ndim else ()
        sent = torch.empty(shape, dtype=own.dtype, device=world.device)
        content = sent.reshape(-1).view(torch.uint8)
        if not content.numel():
            continue
        if world.rank == each.source:
            stored.fill(each.name, sent, first)
            dist.send(content, each.target)
        else:
            dist.recv(content, each.source)
            _rows(own, first - start, last - start).copy_(sent)


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop] if tensor.ndim else tensor
