"""One .pt file with the newest weights and the epoch they are of, beside the checkpoints: {MODEL_STATE, EPOCHS_RUN}."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from drumline.checkpoint import read_weights
from drumline.trainer.callbacks import Callback

if TYPE_CHECKING:
    from drumline.trainer.trainer import Trainer


class SnapshotFile(Callback):
    """Writes the file whenever a checkpoint was saved; reading it back is up to `resume_from`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_save(self, trainer: Trainer, step: int, path: Path) -> None:
        batches = trainer.setup.batches
        content = {"MODEL_STATE": read_weights(path), "EPOCHS_RUN": step * batches.plan.sequences // batches.items}
        aside = self.path.with_name(f".{self.path.name}.partial")
        torch.save(content, aside)
        os.replace(aside, self.path)
