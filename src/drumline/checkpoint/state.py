"""The tensors of a run by their names in a checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a run by its name in a checkpoint, in the same order on every rank."""
    return {**weights(model), **optimizer_state(model, optimizer)[0]}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model's state, by name; a shared one (tied embeddings) appears once, by its first name."""
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def weights_sha256(model: nn.Module) -> str:
    """The hash of a model's weights: over names, dtypes, shapes and bytes in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_fingerprint(model: nn.Module) -> str:
    """A number of 16 hex digits, summed on the device over the bits of all weights: any flipped bit changes it.

    Each row of a weight is a sum of integers, and counts by its place. One number is read; sums wrap at 64 bits.
    """
    tensors = [each.contiguous() for each in weights(model).values() if each.numel()]
    rows = [each.reshape(*each.shape[:1], -1).view(_BITS.get(each.element_size(), torch.uint8)) for each in tensors]
    sums = torch.cat([each.sum(-1, dtype=torch.int64).reshape(-1) for each in rows])
    places = torch.arange(1, 2 * len(sums), 2, device=sums.device)  # odd: none of them loses a bit
    return f"{int((sums * places).sum()) % (1 << 64):016x}"


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer state as tensors by "kind/parameter", and what is not a tensor."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{kind}/{name}"] = value
            else:
                scalars[f"{kind}/{name}"] = value
    return tensors, scalars
