"""The learning rates of a run as text."""

from __future__ import annotations

from drumline.config import OptimConfig
from drumline.optim.optimizers import scaled


def lr_formula(optim: OptimConfig, sequences: int, *, muon_lr: float) -> str:
    """What the peak learning rates follow from. muon_lr: one that suits Muon"""
    lr, peak = optim.lr or 0.0, scaled(optim, sequences=sequences).lr or 0.0
    formula = f"{lr:g}"
    if optim.scale_lr != "none":
        root = "square root of " if optim.scale_lr == "sqrt" else ""
        formula += f" x {root}({sequences} / {optim.base_batch_size} sequences) = {peak:g}"
    rates = {"embeddings": optim.embedding_lr, "head": optim.head_lr}
    others = [f", {name} {rate * peak / lr:g}" for name, rate in rates.items() if rate is not None]
    hint = ""
    if optim.optimizer == "muon" and peak < muon_lr / 8:  # a value for AdamW
        hint = f"; values near {muon_lr:g} suit Muon, and --recipe classic uses AdamW"
    return f"{formula} at its peak by {optim.optimizer}{''.join(others)}{hint}"
