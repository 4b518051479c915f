"""Build the model that a config describes, and its training objective."""

from __future__ import annotations

from torch import Tensor, nn

from drumline.config import TrainConfig, gpt_config
from drumline.model.gpt import GPT

_VOCAB_MULTIPLE = 64


def build_model(config: TrainConfig, *, vocab_size: int) -> nn.Module:
    """The model of a resolved config, with newly initialized weights; seed torch first."""
    rows = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE  # matmuls are faster with round sizes
    if config.model.init_from and config.data.vocab_size:
        # A model from elsewhere keeps its own: rows that it never had would have logits of 0, more than most others.
        rows = vocab_size = config.data.vocab_size
    shape = gpt_config(config.model, vocab_size=rows)
    if config.model.model == "gpt":
        model: nn.Module = GPT(shape)
    else:
        from drumline.model.plugin import plugin_model

        model = plugin_model(config, shape)
    if isinstance(model, GPT):
        model.vocabulary = vocab_size
        if config.run.activation_checkpointing != "none":
            from drumline.model.recomputing import recompute

            recompute(model, config.run.activation_checkpointing)
    return model


def token_objective(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None, *tuple[Tensor, ...]]) -> Tensor:
    """The summed cross entropy of a micro-batch, times a scalar if the batch has one more element."""
    inputs, targets, documents, *scale = batch
    extra = {} if documents is None else {"document_ids": documents}
    loss: Tensor = model(inputs, targets=targets, **extra)[1]
    return loss * scale[0] if scale else loss
