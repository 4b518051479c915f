"""`drumline train --dry_run`: the resolved config, model size, memory, tokens and steps, without training."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from drumline.bench.copies import State, in_shared_memory, on_gpu
from drumline.bench.estimates import Memory, estimate
from drumline.bench.memory import free_on_host
from drumline.config import TrainConfig, is_mix, preset, to_toml, with_preset
from drumline.data import (
    BatchPlan,
    Data,
    TokenFile,
    check_sources,
    is_tokens,
    open_tokens,
    plan_batches,
    with_token_facts,
)
from drumline.files import choose_folder
from drumline.huggingface import export_note
from drumline.mixes import open_mix
from drumline.parallel import Place, World, own_place, pick_device, pick_dtype
from drumline.sharding import check_shard, check_sharding
from drumline.snapshots import free_in
from drumline.stores import in_stores, mirrored
from drumline.units import count, counted


def describe(config: TrainConfig, *, nproc: int) -> tuple[str, str]:
    """The output of `drumline train --dry_run`: the config as TOML, and what else is known.

    nproc: number of ranks that the command would start here; 0 if this process would train itself
    """
    has_facts = is_tokens(config.data.train_data_path) or config.data.stages
    config = with_preset(with_token_facts(config) if has_facts else config)
    folder = choose_folder(config)
    if not folder.data.exists():  # a run that exists has tokens of its own
        check_sources(config.data)
    ranks = nproc * config.ranks.hosts[1] or own_place().size
    shown = to_toml(config)
    if nproc and config.ranks.shard == "host":
        config = replace(config, ranks=replace(config.ranks, shard=nproc if nproc > 1 else "full"))
    device = pick_device(config.run.device)
    dtype = pick_dtype(config.run.dtype, device)
    check_sharding(config, ranks=ranks, device=device, elastic=config.ranks.hosts[0] < config.ranks.hosts[1])
    plan = plan_batches(config.batch, default_batch_size=preset(config.model.preset).batch_size, world_size=ranks)
    rounds = len(plan.share(0, ranks))  # raises if there are more ranks than micro-batches
    model = config.model
    own = mirrored(config.data) if in_stores(config.data) else config.data
    source = own.train_data_path
    mixed = open_mix(own) if is_mix(source) else None
    tokens = mixed.train if mixed else open_tokens(source, dtype=config.data.data_dtype) if is_tokens(source) else None
    vocab_size = (tokens.vocab_size if tokens else None) or config.data.vocab_size
    assert vocab_size and model.context
    tokens_at_once = plan.micro_batch_size * model.context
    memory = estimate(
        config, tokens=tokens_at_once, vocab_size=vocab_size, device=device, dtype=dtype, ranks=ranks, rounds=rounds
    )
    total = f"{model.context} = {plan.sequences * model.context:,} tokens"
    on_ranks = f", on {counted(ranks, 'rank')}" if ranks > 1 else ""
    return shown, "\n".join(
        [
            f"run folder       {folder.path} (nothing was written)",
            f"parameters       {memory.parameters:,}",
            f"memory           about {memory.peak_bytes / 1e9:.2f} GB on {device.type} "
            f"({memory.state_bytes / 1e9:.2f} weights and optimizer, {memory.step_bytes / 1e9:.2f} gradients and "
            "activations)",
            *_offloaded(memory, nproc=nproc),
            *_copies(config, memory, device, ranks=ranks, nproc=nproc),
            f"tokens per step  {counted(plan.micro_batch_size, 'sequence')} x "
            f"{counted(plan.micro_batches, 'micro-batch')} x {total}{on_ranks}",
            f"steps            {_length(config, plan, tokens, mixed)}",
            *(mixed.mix.described(plan, config) if mixed else ()),
            f"export           {export_note(model)}",
        ]
    )


def _offloaded(memory: Memory, *, nproc: int) -> list[str]:
    """What the ranks of a host keep in its memory."""
    own = _ranks_here(nproc)
    if not memory.host_bytes:
        return []
    free, _ = free_on_host(World(Place(), torch.device("cpu")))
    return [
        f"host memory      about {own * memory.host_bytes / 1e9:.2f} GB for weights, gradients and optimizer of "
        f"{counted(own, 'rank')} on each host, where {free / 1e9:.2f} GB are free"
    ]


def _ranks_here(nproc: int) -> int:
    return nproc or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _copies(config: TrainConfig, memory: Memory, device: torch.device, *, ranks: int, nproc: int) -> list[str]:
    """What saves and snapshots take beside that."""
    own = _ranks_here(nproc)
    every = config.run.snapshot_every
    snapshots = nproc > 0 if every == "auto" else every > 0
    shard = config.ranks.shard
    state = State(
        bytes=memory.checkpoint_bytes,
        ranks_per_host=own,
        hosts=max(1, ranks // own),
        snapshots=snapshots,
        sharing=1 if shard == "none" else check_shard(shard, ranks, elastic=True),
        copies=config.run.snapshot_copies,
    )
    lines = []
    if device.type == "cuda":
        left = torch.cuda.mem_get_info(device)[0] - memory.peak_bytes
        lines.append(f"copies           {on_gpu(state, free_bytes=left)}")
    with suppress(OSError):  # no such place: snapshots are disabled, and the run will say so
        if snapshots:
            lines.append(f"snapshots        {in_shared_memory(state, free_bytes=free_in(Path('/dev/shm')))}")
    return lines


def _length(config: TrainConfig, plan: BatchPlan, tokens: TokenFile | None, mixed: Data | None) -> str:
    batch, context = config.batch, config.model.context or 1
    if batch.minutes is not None:
        return f"as many as fit in {counted(batch.minutes, 'minute')}, chosen from the speed of the first steps"
    if batch.epochs is None:
        return f"{batch.total_steps or 0:,}"
    epochs = counted(batch.epochs, "epoch")
    if tokens is None:
        return f"{epochs}; the number of steps is known once the text is tokenized"
    items = (len(tokens) - 1) // context if tokens.targets is None else tokens.windows(context)
    if mixed is not None:
        items = mixed.mix.batches(tokens, plan, context=context, seed=0, total_steps=0).items
        return f"{math.ceil(batch.epochs * items / plan.sequences):,}"
    steps = math.ceil(batch.epochs * items / plan.sequences)
    return f"{steps:,} ({epochs} of {count(len(tokens))} tokens)"
