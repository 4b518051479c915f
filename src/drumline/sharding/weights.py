"""Facts about weights that are spread over ranks: the same numbers as for whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from drumline.sharding.mesh import SHARD


def own_rows(tensor: DTensor) -> range:
    """The rows of the whole tensor that this rank has."""
    group = tensor.device_mesh[SHARD] if tensor.device_mesh.ndim > 1 else tensor.device_mesh
    each = -(-len(tensor) // group.size())
    start = min(len(tensor), each * group.get_local_rank())
    return range(start, min(len(tensor), start + each))


def rows_of_all(tensors: Sequence[Tensor], values: Sequence[Tensor], device: torch.device) -> Tensor:
    """One number per row of each tensor, from what each rank knows of its own rows: (all rows)."""
    whole: list[Tensor] = []
    group = next((each.device_mesh.get_group(SHARD) for each in tensors if isinstance(each, DTensor)), None)
    for tensor, own in zip(tensors, values, strict=True):
        rows = own.new_zeros(len(tensor) if tensor.dim() else 1, device=device)
        if isinstance(tensor, DTensor):
            place = own_rows(tensor)
            rows[place.start : place.stop] = own.to(device)
        elif group is None or dist.get_rank(group) == 0:  # a whole one counts once
            rows += own.to(device)
        whole.append(rows)
    total = torch.cat(whole)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sums_of_all(tensors: Sequence[Tensor], row_sums: Callable[[Tensor], Tensor]) -> Tensor:
    """One integer for each row of the whole tensors, as `weights_fingerprint` needs them."""
    own = [row_sums(part) if (part := local(each)).numel() else part.new_zeros(0).long() for each in tensors]
    device = next(each.device_mesh.device_type for each in tensors if isinstance(each, DTensor))
    return rows_of_all(tensors, own, torch.device(device))
