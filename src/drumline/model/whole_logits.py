"""The loss with all logits at once: for float16, and to compare others with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.model.loss import IGNORED, WATCHERS, capped


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float = 0.0) -> Tensor:
    """The same with all logits at once: (N, D), (V, D), int64 (N) -> float32 scalar."""
    logits = capped(F.linear(hidden, weight).float(), softcap)
    if WATCHERS:
        with torch.no_grad():
            losses = [F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)]
        for watcher in WATCHERS:
            watcher(losses)
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
