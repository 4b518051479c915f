"""What a run would be, without starting it: the resolved config, size, memory, tokens and steps."""

from __future__ import annotations

import math

import torch

from drumline.batches import plan_batches
from drumline.config import TrainConfig
from drumline.config_file import to_toml
from drumline.hardware import pick_device, pick_dtype
from drumline.optim import parameters_by_kind
from drumline.presets import preset, with_preset
from drumline.records import count
from drumline.runs import build_model, choose_folder
from drumline.tokens import is_tokens, open_tokens

_LAYER_ACTIVATIONS = 14
"""Values kept for the backward pass per token, layer and unit of width, counted for a pre-norm block of width 4d."""


def describe(config: TrainConfig) -> str:
    """The answer of `drumline train --dry_run`."""
    config = with_preset(config)
    device = pick_device(config.run.device)
    dtype = pick_dtype(config.run.dtype, device)
    plan = plan_batches(config.batch, default_batch_size=preset(config.model.preset).batch_size, world_size=1)
    model = config.model
    tokens = open_tokens(config.data.train_data_path) if is_tokens(config.data.train_data_path) else None
    vocab_size = (tokens.vocab_size if tokens else None) or config.data.vocab_size
    assert vocab_size and model.context and model.n_layers and model.d_model
    with torch.device("meta"):
        shapes = build_model(config, vocab_size=vocab_size)
    parameters = sum(p.numel() for p in shapes.parameters())
    by_muon = sum(p.numel() for p in parameters_by_kind(shapes)["matrices"]) if config.optim.optimizer == "muon" else 0
    steps, length = config.batch.total_steps, f"{config.batch.total_steps or 0:,}"
    if steps is None:
        length = f"{config.batch.epochs:g} epochs, counted once the text is prepared"
        if tokens is not None:
            steps = math.ceil((config.batch.epochs or 0) * ((len(tokens) - 1) // model.context) / plan.sequences)
            length = f"{steps:,} ({config.batch.epochs:g} epochs of {count(len(tokens))} tokens)"
    state, activations = memory_bytes(
        parameters,
        by_muon=by_muon,
        tokens=plan.micro_batch * model.context,
        n_layers=model.n_layers,
        d_model=model.d_model,
        vocab_size=vocab_size,
        value_bytes=dtype.itemsize,
    )
    total = f"{model.context} = {plan.sequences * model.context:,} tokens"
    return "\n".join(
        [
            to_toml(config),
            f"run folder       {choose_folder(config).path} (nothing was written)",
            f"parameters       {parameters:,}",
            f"memory           about {(state + activations) / 1e9:.2f} GB on {device.type} "
            f"({state / 1e9:.2f} weights and optimizer, {activations / 1e9:.2f} activations)",
            f"tokens per step  {plan.micro_batch} sequences x {plan.micro_batches} micro-batches x {total}",
            f"steps            {length}",
        ]
    )


def memory_bytes(
    parameters: int,
    *,
    by_muon: int = 0,
    tokens: int,
    n_layers: int,
    d_model: int,
    vocab_size: int,
    value_bytes: int,
) -> tuple[int, int]:
    """An estimate: (weights, gradients and the optimizer's state in float32; activations and logits of a micro-batch).

    AdamW keeps two moments of each weight, Muon one of the `by_muon` weights that are its own.
    """
    activations = tokens * n_layers * d_model * _LAYER_ACTIVATIONS * value_bytes
    logits = 2 * tokens * vocab_size * 4
    return 16 * parameters - 4 * by_muon, activations + logits
