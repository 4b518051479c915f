"""`drumline train --dry_run`: the resolved config, model size, memory, tokens and steps, without training."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from drumline.bench.copies import State, in_shared_memory, on_gpu
from drumline.config import TrainConfig, gpt_config, preset, to_toml, with_preset
from drumline.data import BatchPlan, TokenFile, check_sources, is_tokens, open_tokens, plan_batches, with_token_facts
from drumline.files import choose_folder
from drumline.huggingface import export_note
from drumline.kernels import FUSED, fits, has_kernels
from drumline.optim import state_size
from drumline.parallel import own_place, pick_device, pick_dtype
from drumline.snapshots import free_in
from drumline.units import count, counted

_KEPT = {(False, False): 19, (False, True): 17, (True, False): 33, (True, True): 21}
"""Activations saved for backward per token, layer and unit of width, as measured; by (modern block, compiled)."""
_KEPT_BY_KERNELS = 14
_ROWS_AT_ONCE = 8192
"""Upper limit for rows of logits."""


def describe(config: TrainConfig, *, nproc: int) -> tuple[str, str]:
    """The output of `drumline train --dry_run`: the config as TOML, and what else is known.

    nproc: number of ranks that the command would start here; 0 if this process would train itself
    """
    config = with_preset(with_token_facts(config) if is_tokens(config.data.train_data_path) else config)
    folder = choose_folder(config)
    if not folder.data.exists():  # a run that exists has tokens of its own
        check_sources(config.data)
    ranks = nproc * config.ranks.hosts[1] or own_place().size
    device = pick_device(config.run.device)
    dtype = pick_dtype(config.run.dtype, device)
    plan = plan_batches(config.batch, default_batch_size=preset(config.model.preset).batch_size, world_size=ranks)
    plan.share(0, ranks)  # raises if there are more ranks than micro-batches
    model = config.model
    source = config.data.train_data_path
    tokens = open_tokens(source, dtype=config.data.data_dtype) if is_tokens(source) else None
    vocab_size = (tokens.vocab_size if tokens else None) or config.data.vocab_size
    assert vocab_size and model.context
    tokens_at_once = plan.micro_batch_size * model.context
    memory = estimate(config, tokens=tokens_at_once, vocab_size=vocab_size, device=device, dtype=dtype)
    state, activations = memory.state_bytes, memory.activation_bytes
    total = f"{model.context} = {plan.sequences * model.context:,} tokens"
    on_ranks = f", on {counted(ranks, 'rank')}" if ranks > 1 else ""
    return to_toml(config), "\n".join(
        [
            f"run folder       {folder.path} (nothing was written)",
            f"parameters       {memory.parameters:,}",
            f"memory           about {(state + activations) / 1e9:.2f} GB on {device.type} "
            f"({state / 1e9:.2f} weights and optimizer, {activations / 1e9:.2f} activations)",
            *_copies(config, memory, device, ranks=ranks, nproc=nproc),
            f"tokens per step  {plan.micro_batch_size} sequences x {counted(plan.micro_batches, 'micro-batch')} "
            f"x {total}{on_ranks}",
            f"steps            {_length(config, plan, tokens)}",
            f"export           {export_note(model)}",
        ]
    )


def _copies(config: TrainConfig, memory: Memory, device: torch.device, *, ranks: int, nproc: int) -> list[str]:
    """What saves and snapshots take beside that."""
    own = nproc or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    every = config.run.snapshot_every
    snapshots = nproc > 0 if every == "auto" else every > 0
    state = State(bytes=memory.checkpoint_bytes, ranks_per_host=own, hosts=max(1, ranks // own), snapshots=snapshots)
    lines = []
    if device.type == "cuda":
        left = torch.cuda.mem_get_info(device)[0] - memory.state_bytes - memory.activation_bytes
        lines.append(f"copies           {on_gpu(state, free_bytes=left)}")
    with suppress(OSError):  # no such place: snapshots are disabled, and the run will say so
        if snapshots:
            lines.append(f"snapshots        {in_shared_memory(state, free_bytes=free_in(Path('/dev/shm')))}")
    return lines


def _length(config: TrainConfig, plan: BatchPlan, tokens: TokenFile | None) -> str:
    batch, context = config.batch, config.model.context or 1
    if batch.minutes is not None:
        return f"as many as fit in {counted(batch.minutes, 'minute')}, chosen from the speed of the first steps"
    if batch.epochs is None:
        return f"{batch.total_steps or 0:,}"
    epochs = counted(batch.epochs, "epoch")
    if tokens is None:
        return f"{epochs}; the number of steps is known once the text is tokenized"
    items = (len(tokens) - 1) // context if tokens.targets is None else tokens.windows(context)
    steps = math.ceil(batch.epochs * items / plan.sequences)
    return f"{steps:,} ({epochs} of {count(len(tokens))} tokens)"


@dataclass(frozen=True)
class Memory:
    """An estimate of the memory of a training step."""

    parameters: int
    state_bytes: int
    """Weights, gradients and optimizer state, in float32."""
    activation_bytes: int
    """Activations of a micro-batch saved for backward, and the logits that exist at one time."""
    checkpoint_bytes: int
    """Weights and optimizer state."""


def estimate(config: TrainConfig, *, tokens: int, vocab_size: int, device: torch.device, dtype: torch.dtype) -> Memory:
    """For a resolved config and micro-batches of `tokens` tokens."""
    model = config.model
    assert model.n_layers and model.d_model
    state = state_size(config, vocab_size=vocab_size)
    kernels = dtype == torch.bfloat16 and has_kernels(device) and fits(gpt_config(model, vocab_size=vocab_size))
    kept = _KEPT[(model.norm != "layernorm", config.run.compile)]
    if kernels and not config.ranks.bitwise and config.model.model in ("gpt", FUSED):
        kept = _KEPT_BY_KERNELS
    rows = tokens if dtype == torch.float16 else min(tokens, _ROWS_AT_ONCE)  # float16 computes all logits at once
    logit_bytes = dtype.itemsize if kernels else dtype.itemsize + 8
    activations = tokens * model.n_layers * model.d_model * kept * dtype.itemsize
    activations += rows * vocab_size * logit_bytes
    return Memory(state.parameters, state.training_bytes, activations, state.checkpoint_bytes)
