"""How much a run's weights and its optimizer's state will take, before either exists."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drumline.config import TrainConfig, with_preset
from drumline.errors import DrumlineError
from drumline.model import build_model
from drumline.optim.optimizers import parameters_by_kind


@dataclass(frozen=True)
class StateSize:
    """In numbers of float32."""

    parameters: int
    moments: int
    """What the optimizer keeps: AdamW two moments of each weight, Muon one of each matrix."""

    @property
    def checkpoint_bytes(self) -> int:
        return 4 * (self.parameters + self.moments)

    @property
    def training_bytes(self) -> int:
        """With gradients."""
        return 4 * (2 * self.parameters + self.moments)


def state_size(config: TrainConfig, *, vocab_size: int) -> StateSize:
    """For a filled-in config; the model is built without memory for its weights."""
    with torch.device("meta"):
        model = build_model(config, vocab_size=vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    by_muon = sum(p.numel() for p in parameters_by_kind(model)["matrices"]) if config.optim.optimizer == "muon" else 0
    return StateSize(parameters, 2 * parameters - by_muon)


def checkpoints_bytes(config: TrainConfig) -> int:
    """About what a run's checkpoints will take on disk; 0 for plug-ins, and for settings that will be refused."""
    if config.model.model != "gpt":
        return 0
    try:
        config = with_preset(config)
        one = state_size(config, vocab_size=config.data.vocab_size or 1).checkpoint_bytes
    except DrumlineError:
        return 0
    return one * (config.run.keep_checkpoints + config.run.keep_best + 1)  # one is written before one goes
