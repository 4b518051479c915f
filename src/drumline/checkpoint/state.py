"""The tensors of a run by their names in a checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from drumline.lazy import room

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run by its name in a checkpoint, in the same order on every rank."""
    return {**weights(model), **optimizer_state(model, optimizer)[0]}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model's state, by name; a shared one (tied embeddings) appears once, by its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in first.values()}


def weights_sha256(model: nn.Module) -> str:
    """The hash of a model's weights: over names, dtypes, shapes and bytes in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole = getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()  # a sharded one is gathered by all ranks
        digest.update(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """A number of 16 hex digits, summed on the device over the bits of all weights: any flipped bit changes it.

    Each row of a weight is a sum of integers, and counts by its place. One number is read; sums wrap at 64 bits.
    """
    tensors = [each.contiguous() for each in weights(model).values() if each.numel()]
    spread = any(hasattr(each, "full_tensor") for each in tensors)
    sums = room("sharding").sums_of_all(tensors, _row_sums) if spread else torch.cat([*map(_row_sums, tensors)])
    # Odd factors: none of them loses a bit.
    return f"{int((sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()) % (1 << 64):016x}"


def _row_sums(tensor: Tensor) -> Tensor:
    """Of each row: int64 (rows)."""
    row = tensor.reshape(*tensor.shape[:1], -1).view(torch.uint8)
    # As integers of as many bytes as fit, at most 8: a sum of those takes no longer than to read them.
    wide = row.view(_BITS[(n := row.shape[-1] | int(row.storage_offset()) | 8) & -n])
    return wide.sum(-1, dtype=torch.int64).reshape(-1)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer state as tensors by "kind/parameter", and what is not a tensor."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            (tensors if isinstance(value, Tensor) else scalars)[f"{kind}/{name}"] = value
    return tensors, scalars
