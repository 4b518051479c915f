"""Training FLOPs, for MFU."""

from __future__ import annotations

from torch import nn


def flops_per_token(model: nn.Module, *, context: int) -> float:
    """Training FLOPs per token: as the model reports, else 6 per matrix weight."""
    of_model = getattr(model, "flops_per_token", None)
    if of_model is not None:
        return float(of_model(context))
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return 6.0 * sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
