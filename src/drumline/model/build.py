"""Build the model that a config describes, and its training objective."""

from __future__ import annotations

from torch import Tensor, nn

from drumline.config import TrainConfig, gpt_config
from drumline.model.gpt import GPT

_VOCAB_MULTIPLE = 64


def build_model(config: TrainConfig, *, vocab_size: int) -> nn.Module:
    """The model of a resolved config, with newly initialized weights; seed torch first."""
    rows = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE  # matmuls are faster with round sizes
    # A model from elsewhere keeps its own: rows that it never had would have logits of 0, more than most others.
    shape = gpt_config(config.model, vocab_size=(config.model.init_from and config.data.vocab_size) or rows)
    if config.model.model == "gpt":
        return GPT(shape)
    from drumline.model.plugin import checked_plugin

    make, options = checked_plugin(config)
    model: nn.Module = make(shape, **options)
    return model


def token_objective(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None, *tuple[Tensor, ...]]) -> Tensor:
    """The summed cross entropy of a micro-batch, times a scalar if the batch has one more element."""
    inputs, targets, documents, *scale = batch
    extra = {} if documents is None else {"document_ids": documents}
    loss: Tensor = model(inputs, targets=targets, **extra)[1]
    return loss * scale[0] if scale else loss
