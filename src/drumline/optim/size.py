"""The size of a run's weights and optimizer state, before they are allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drumline.config import TrainConfig, with_preset
from drumline.errors import DrumlineError
from drumline.model import build_model
from drumline.optim.optimizers import parameters_by_kind


@dataclass(frozen=True)
class StateSize:
    """Counts of float32 numbers."""

    parameters: int
    moments: int
    """Optimizer state: two moments per weight for AdamW, one per matrix weight for Muon."""

    @property
    def checkpoint_bytes(self) -> int:
        return 4 * (self.parameters + self.moments)


def state_size(config: TrainConfig, *, vocab_size: int) -> StateSize:
    """For a resolved config; the model is built on the meta device."""
    with torch.device("meta"):
        model = build_model(config, vocab_size=vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    by_muon = sum(p.numel() for p in parameters_by_kind(model)["matrices"]) if config.optim.optimizer == "muon" else 0
    return StateSize(parameters, 2 * parameters - by_muon)


def checkpoints_bytes(config: TrainConfig) -> int:
    """Estimated disk space of a run's checkpoints; 0 for custom models or optimizers, and for invalid settings."""
    if config.model.model != "gpt":
        return 0
    try:
        config = with_preset(config)
        one = state_size(config, vocab_size=config.data.vocab_size or 1).checkpoint_bytes
    except DrumlineError:
        return 0
    return one * (config.run.keep_checkpoints + config.run.keep_best + 1)  # a new one is written before an old one goes
