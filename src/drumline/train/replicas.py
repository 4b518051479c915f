"""Replicas that drift apart: before a state is saved, the ranks compare their weights."""

from __future__ import annotations

import hashlib
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from drumline.checkpoint import weights
from drumline.parallel import World, waiting_for
from drumline.train.guard import ReplicaDriftError


def compare_replicas(model: nn.Module, world: World, step: int, *, tell: Callable[[str, dict[str, Any]], None]) -> None:
    """ReplicaDriftError on every rank if one has other weights than most."""
    own = replica_digest(model)
    with waiting_for("the comparison of the weights"):
        digests = world.gather([socket.gethostname(), own])
    usual, agreeing = Counter(digest for _, digest in digests).most_common(1)[0]
    odd = [f"rank {rank} on {host}" for rank, (host, digest) in enumerate(digests) if digest != usual]
    if not odd:
        return
    if agreeing * 2 > len(digests):
        problem = f"{', '.join(odd)} has other weights than the {agreeing} other ranks at step {step:,}"
    else:  # with two ranks nobody knows which of them erred
        hosts = ", ".join(f"rank {rank} on {host}" for rank, (host, _) in enumerate(digests))
        problem = f"the replicas ({hosts}) no longer have the same weights at step {step:,}"
    tell("", {"event": "replica drift", "what": problem})
    raise ReplicaDriftError(
        problem,
        fix="start the same command again to go on from the last checkpoint; test the memory of the odd host",
        told=not world.is_main,
    )


def replica_digest(model: nn.Module) -> str:
    """The bits of every weight added up as integers on the device: any one flipped bit changes it."""
    sums = []
    for tensor in weights(model).values():
        bits = tensor.contiguous().reshape(-1).view(torch.uint8)
        width = next(w for w in (4, 2, 1) if bits.numel() % w == 0 and bits.storage_offset() % w == 0)
        sums.append(bits.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]).sum(dtype=torch.int64))
    return hashlib.sha256(repr(torch.stack(sums).tolist()).encode()).hexdigest()[:16]
