"""`drumline train`: parse the settings, check this machine, and train here or start ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from drumline.cli.app import PROCESS
from drumline.config import (
    PRESETS,
    BatchConfig,
    DataConfig,
    ModelSettings,
    OptimConfig,
    RanksConfig,
    RecordConfig,
    RunConfig,
    TrainConfig,
)
from drumline.signals import raise_interrupts

_DEFAULTS = TrainConfig()
_MODEL = Group("Model", help="Model options default to the values of the preset and its recipe.", sort_key=1)

train = App(
    name="train",
    help_epilogue=f"Presets: {', '.join(PRESETS)}. Every setting can also be set in a TOML file: --config run.toml",
)


@train.default
def run_training(
    *,
    model: Annotated[ModelSettings, Parameter(name="*", group=_MODEL)] = _DEFAULTS.model,
    data: Annotated[DataConfig, Parameter(name="*", group=Group("Data", sort_key=2))] = _DEFAULTS.data,
    batch: Annotated[BatchConfig, Parameter(name="*", group=Group("Batch", sort_key=3))] = _DEFAULTS.batch,
    optim: Annotated[OptimConfig, Parameter(name="*", group=Group("Optimizer", sort_key=4))] = _DEFAULTS.optim,
    run: Annotated[RunConfig, Parameter(name="*", group=Group("Run", sort_key=5))] = _DEFAULTS.run,
    ranks: Annotated[RanksConfig, Parameter(name="*", group=Group("Ranks", sort_key=6))] = _DEFAULTS.ranks,
    records: Annotated[RecordConfig, Parameter(name="*", group=Group("Records", sort_key=7))] = _DEFAULTS.records,
    config: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train a model. Without arguments: a small GPT on Python source code.

    Parameters
    ----------
    config
        TOML file with settings. Flags take precedence.
    dry_run
        Print the resolved config, parameter count, memory estimate, tokens and steps, without training.
    """
    settings = TrainConfig(model=model, data=data, batch=batch, optim=optim, run=run, ranks=ranks, records=records)
    if dry_run:
        from drumline.bench import describe

        print(describe(settings))
        return 0
    # Must be set before torch is imported. torch's warnings about stores say less than drumline's own messages.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if ranks.nproc and "RANK" not in os.environ:
        from drumline.elastic import start_server

        start_server(ranks.nproc, early=PROCESS.is_ours)
    nproc = ranks_to_start(settings)
    _check_first(settings, nproc=nproc)
    if nproc:
        from drumline.elastic import launch_training

        return launch_training(settings, nproc=nproc)
    from drumline.train import train_here

    raise_interrupts()
    return train_here(settings)


def _check_first(config: TrainConfig, *, nproc: int) -> None:
    """Run the doctor's quick checks, unless preflight rules them out."""
    from drumline.cli.preflight import is_plain

    if config.run.doctor != "off" and (nproc or not is_plain(config, os.environ)):
        from drumline.cli.doctor import check_first

        check_first(config, ranks=nproc)


def ranks_to_start(config: TrainConfig) -> int:
    """The number of ranks to start; 0 if this process is a rank already or trains alone."""
    import torch

    from drumline.parallel import own_place

    if "RANK" in os.environ or own_place().size > 1:
        return 0
    on_gpus = config.run.device in ("auto", "cuda") and torch.cuda.is_available()
    wanted = config.ranks.nproc or (torch.cuda.device_count() if on_gpus else 1)
    alone = wanted == 1 and config.ranks.nproc is None and config.ranks.hosts == (1, 1)
    return 0 if alone else wanted
