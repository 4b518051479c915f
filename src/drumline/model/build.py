"""The model that a config describes, and the loss it is trained by."""

from __future__ import annotations

from torch import Tensor, nn

from drumline.config import TrainConfig, gpt_config
from drumline.model.gpt import GPT

_VOCAB_MULTIPLE = 64


def build_model(config: TrainConfig, *, vocab_size: int) -> nn.Module:
    """The model a config (filled in) describes, with freshly drawn weights; draw them after seeding torch."""
    padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE  # matrix products are faster on round sizes
    shape = gpt_config(config.model, vocab_size=padded)
    if config.model.model == "gpt":
        return GPT(shape)
    from drumline.model.plugin import checked_plugin

    make, options = checked_plugin(config)
    model: nn.Module = make(shape, **options)
    return model


def token_objective(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
    """The summed cross entropy of a micro-batch of windows."""
    inputs, targets, documents = batch
    extra = {} if documents is None else {"document_ids": documents}
    loss: Tensor = model(inputs, targets=targets, **extra)[1]
    return loss
