"""Parameter groups, AdamW, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from drumline.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig, *, total_steps: int) -> float:
    """Linear warmup to `optim.lr`, then the schedule; `step` counts from 0."""
    assert optim.lr is not None
    warmup = warmup_steps(optim, total_steps=total_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "wsd":
        decay_steps = max(1, round(optim.decay_fraction * total_steps))
        progress = min(1.0, max(0.0, (step - (total_steps - decay_steps)) / decay_steps))
        return optim.lr * (1.0 - (1.0 - optim.min_lr_ratio) * progress)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    low = optim.min_lr_ratio
    return optim.lr * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def scaled(optim: OptimConfig, *, sequences: int) -> OptimConfig:
    """With the learning rate that suits a step of `sequences`, if it is to follow the size of a step."""
    if optim.scale_lr == "none" or optim.lr is None or optim.base_batch_size is None:
        return optim
    ratio = sequences / optim.base_batch_size
    return replace(optim, lr=optim.lr * (ratio if optim.scale_lr == "linear" else math.sqrt(ratio)))


def warmup_steps(optim: OptimConfig, *, total_steps: int) -> int:
    return total_steps // 50 if optim.warmup_steps is None else optim.warmup_steps


def make_optimizer(model: nn.Module, optim: OptimConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors (norms, biases) alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    assert optim.lr is not None
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=all(p.device.type in ("cpu", "cuda") for p in parameters),
    )
