"""Which rows of a tensor a rank has, and the names of pieces.

    head.weight@128:256:512     rows 128 to 255 of the 512 of head.weight
    head.weight                 all of it

A tensor is cut along its first dimension as FSDP does: every rank of a group has the same number of rows, but the last
ones may have fewer or none. Several groups have the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from drumline.errors import ConfigError

_PIECE = re.compile(r"(.+)@(\d+):(\d+):(\d+)", re.DOTALL)
Range = tuple[int, int]


@dataclass(frozen=True)
class Spread:
    """How the rows of a tensor are spread over the ranks."""

    holders: tuple[tuple[int, ...], ...]
    """The ranks that have each share of the rows."""

    def rows(self, length: int, rank: int) -> Range:
        """The first row of a rank, and the one after its last."""
        share = next(share for share, ranks in enumerate(self.holders) if rank in ranks)
        return cut(length, share, len(self.holders))


def cut(length: int, share: int, shares: int) -> Range:
    """The rows of a share, as torch.chunk cuts them."""
    most = -(-length // shares)
    return min(length, share * most), min(length, (share + 1) * most)


def piece_name(name: str, start: int, stop: int, length: int) -> str:
    return name if (start, stop) == (0, length) else f"{name}@{start}:{stop}:{length}"


def split_name(name: str) -> tuple[str, tuple[int, int, int] | None]:
    """The tensor that a piece is of; and its first row, the one after its last and the number of all rows."""
    match = _PIECE.fullmatch(name)
    return (match[1], (int(match[2]), int(match[3]), int(match[4]))) if match else (name, None)


def is_spread(tensors: Iterable[Tensor]) -> bool:
    """Whether some of them are DTensors; without loading what defines those."""
    return any(hasattr(each, "placements") for each in tensors)


def spread_of(tensor: Tensor) -> Spread | None:
    """None: every rank has all of it."""
    placements = getattr(tensor, "placements", ())
    cut_at = [at for at, placement in enumerate(placements) if placement.is_shard()]
    if not cut_at:
        return None
    whole = all(placement.is_replicate() for at, placement in enumerate(placements) if at != cut_at[0])
    if not whole or placements[cut_at[0]] != _by_rows():
        raise ConfigError(
            f"a parameter is spread over the ranks as {placements}, which cannot be saved",
            fix="shard along the first dimension of parameters only",
        )
    dtensor: Any = tensor
    return _spread(dtensor.device_mesh, cut_at[0])


def _by_rows() -> Any:
    from torch.distributed.tensor import Shard

    return Shard(0)


@cache
def _spread(mesh: Any, at: int) -> Spread:
    ranks = mesh.mesh.movedim(at, 0).reshape(mesh.mesh.shape[at], -1)
    return Spread(tuple(tuple(sorted(each)) for each in ranks.tolist()))


def rows_by_rank(tensor: Tensor, size: int) -> list[Range]:
    """The rows that each of so many ranks has; of a scalar, the only one."""
    length, spread = tensor.shape[0] if tensor.ndim else 1, spread_of(tensor)
    return [spread.rows(length, rank) if spread else (0, length) for rank in range(size)]


def local_part(tensor: Tensor) -> Tensor:
    """The rows that this rank has, in the same memory."""
    if not hasattr(tensor, "placements"):
        return tensor
    dtensor: Any = tensor
    own: Tensor = dtensor.to_local()
    return own.detach()


def in_pieces(tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a rank has of these tensors, by the names of pieces; tensors that it has no rows of are left out."""
    own = {}
    for name, tensor in tensors.items():
        spread = spread_of(tensor)
        if spread is None:
            own[name] = local_part(tensor)
        elif (rows := spread.rows(len(tensor), rank))[0] < rows[1]:
            own[piece_name(name, *rows, len(tensor))] = local_part(tensor)
    return own


def room_like(parameter: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Memory for state of a parameter, spread as that is if the state has a row for each of its rows."""
    if spread_of(parameter) is None or not shape or shape[0] != parameter.shape[0]:
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    part = local_part(parameter)
    own = torch.empty((len(part), *shape[1:]), dtype=dtype, device=part.device)
    strides = torch.empty(shape, device="meta").stride()
    room: Tensor = DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=shape, stride=strides
    )
    return room
