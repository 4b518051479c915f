"""Sizes of models, and training FLOPs for MFU."""

from __future__ import annotations

from torch import nn

from drumline.model.gpt import GPT


def num_parameters(model: nn.Module, *, embedding: bool = True) -> int:
    """Number of weights; `embedding=False` leaves out embedding tables (including a tied head)."""
    tables = _tables(model)
    return sum(p.numel() for p in model.parameters() if embedding or id(p) not in tables)


def flops_per_token(model: nn.Module, *, context: int) -> float:
    """Training FLOPs per token: as the model reports; of a GPT, 6 per weight used in a matmul, plus attention; else 6
    per matrix weight.

    Counted as in PaLM: attention over the whole context, although causal kernels skip half of it.
    """
    of_model = getattr(model, "flops_per_token", None)
    if of_model is not None:
        return float(of_model(context))
    if isinstance(model, GPT):
        tied = model.token_embedding.weight.numel() if model.head is None else 0
        weights = num_parameters(model, embedding=False) + tied
        attended = model.config.n_layers * model.config.n_heads * model.config.head_width
        return 6.0 * weights + 12.0 * attended * context
    tables = _tables(model)
    return 6.0 * sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)


def _tables(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
