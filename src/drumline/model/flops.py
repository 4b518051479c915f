"""How much arithmetic training takes, for MFU."""

from __future__ import annotations

from torch import nn


def flops_per_token(model: nn.Module, *, context: int) -> float:
    """Floating-point operations to train on one token: what the model says, else 6 for each weight of its matrices."""
    of_model = getattr(model, "flops_per_token", None)
    if of_model is not None:
        return float(of_model(context))
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return 6.0 * sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
