"""What some runs have or are told at their start: trackers, choices that cannot work, what machine and length mean."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

from drumline.config import OPTIMIZERS, TrainConfig
from drumline.data import Data, TokenBatches
from drumline.errors import ConfigError
from drumline.files import RunFolder
from drumline.lazy import room
from drumline.report import Records, add_trackers, with_epochs
from drumline.train.step import Step
from drumline.units import counted

_BUSY = 1.5
"""Above this load per core, the cores are not free for a run, and it says so."""
_FEW = 20


def check_choices(config: TrainConfig, device: torch.device) -> None:
    """Refuse a custom model or optimizer, or float8, that cannot work."""
    if config.model.model != "gpt":
        refuse_recomputing(config)
        from drumline.model import checked_plugin

        checked_plugin(config)
    if config.optim.optimizer not in (None, *OPTIMIZERS):
        from drumline.optim import checked_optimizer

        checked_optimizer(config.optim.optimizer)
    if config.run.fp8:
        room("kernels").check_fp8(config, device)


def refuse_recomputing(config: TrainConfig) -> None:
    """Only drumline's own GPT says what its blocks are."""
    if config.run.activation_checkpointing != "none":
        raise ConfigError(
            f"--activation_checkpointing {config.run.activation_checkpointing} is for drumline's own GPT, not for "
            f"--model {config.model.model}",
            fix="call torch.utils.checkpoint in the model's forward, or use --model gpt",
        )


def other_batches(config: TrainConfig, data: Data, *, total_steps: int) -> Callable[..., TokenBatches]:
    """What makes the batches of a run whose data are more than one stream of tokens, or in a store."""
    make = _maker(config, data, total_steps=total_steps)
    if "://" not in config.data.train_data_path:
        return make
    return room("stores").read_ahead(make, total_steps=total_steps)  # type: ignore[no-any-return]


def _maker(config: TrainConfig, data: Data, *, total_steps: int) -> Callable[..., TokenBatches]:
    if data.mix is not None:
        return partial(data.mix.batches, total_steps=total_steps)
    if config.data.skip_list:
        return room("reasons").without_skipped(config.data.skip_list)  # type: ignore[no-any-return]
    if data.train.packer in ("", "stores"):
        return TokenBatches
    return room(data.train.packer).make_batches  # type: ignore[no-any-return]


def add_to(records: Records, config: TrainConfig, folder: RunFolder) -> None:
    """Trackers, and the epoch in the records of a run by epochs."""
    if config.records.tensorboard or config.records.use_wandb or config.records.sink:
        add_trackers(records, config.records, folder, settings=asdict(config))
    if config.batch.epochs is not None:
        records.formats = with_epochs(config.batch.epochs)


def advice(config: TrainConfig, step: Step, *, total_steps: int) -> list[str]:
    cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, lines = step.precision.device.type, []
    if config.ranks.shard != "none":
        lines.append(room("sharding").kernels_in_use(config, step))
    elif config.run.snapshot_copies > 1:
        lines.append("note: --snapshot_copies does nothing without --shard: each host has all of a snapshot anyway")
    if device == "cpu" and ranks > cores:
        on_cores = f"{ranks} on {counted(cores, 'core')}"
        lines.append(f"ranks  {on_cores}: they take turns, and --nproc {cores} is likely faster")
    load = os.getloadavg()[0]
    if device == "cpu" and load > _BUSY * cores:
        passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
        helps = "" if passive else "; OMP_WAIT_POLICY=passive helps beside them"
        lines.append(f"load   {load:.1f} on {counted(cores, 'core')}: others slow this run down{helps}")
    if config.batch.minutes is not None and total_steps < _FEW:
        short = f"{counted(total_steps, 'step')} in {counted(config.batch.minutes, 'minute')}"
        lines.append(f"warning: {short} is too short to learn much: use more --minutes, or a smaller model")
    return lines + (room("elastic").under_torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else [])
