"""`drumline train`: parse the settings, check this machine, and train here or start ranks."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Mapping
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
    gpt_config,
    preset,
    with_preset,
)
from drumline.signals import raise_interrupts

_DEFAULTS = TrainConfig()
_OPEN_FILES = 1024
"""Below this limit of open files, the doctor warns."""
# Set by a launcher, or read only by processes that use GPUs.
_FOR_THE_DOCTOR = {"RANK", "SLURM_STEP_NUM_TASKS", "CUDA_VISIBLE_DEVICES"}
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
    trust: Annotated[bool, Parameter(negative=())] = False,
    watch: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Train a model. Without arguments: a small GPT on Python source code.

    Parameters
    ----------
    config
        TOML file with settings. Flags take precedence.
    dry_run
        Print the resolved config; on stderr, parameter count, memory estimate, tokens and steps. Does not train.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    watch
        Serve a page of the run while it runs, as drumline watch does, and print its address.
    """
    settings = TrainConfig(model=model, data=data, batch=batch, optim=optim, run=run, ranks=ranks, records=records)
    preset(model.preset)  # a wrong name is told before torch is imported
    if dry_run:
        from drumline.cli.bench import print_dry_run

        return print_dry_run(settings, nproc=ranks_to_start(settings))
    if watch:
        from drumline.watch import start_page

        start_page(run.run_dir)
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
    """Run the doctor's quick checks, unless there is nothing for them to find."""
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
    return 0 if wanted == 1 and config.ranks.nproc is None and config.ranks.hosts == (1, 1) else wanted


def is_plain(config: TrainConfig, environ: Mapping[str, str]) -> bool:
    """Whether this process trains alone on a CPU and uses nothing that could be missing or misconfigured.

    Fast and conservative: in case of doubt, the doctor runs.
    """
    import torch

    run = config.run
    on_gpu = run.device == "cuda" or torch.cuda.is_available()
    if on_gpu or run.compile or run.dtype == "bfloat16" or config.model.model != "gpt":
        return False
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = [environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ]
    few_files = 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _OPEN_FILES
    if few_files or _FOR_THE_DOCTOR & environ.keys() or not all(n.isdigit() and 0 < int(n) <= cores for n in threads):
        return False
    folder = Path(run.run_dir or "runs").absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    is_writable = existing.is_dir() and os.access(existing, os.W_OK)
    return is_writable and shutil.disk_usage(existing).free >= _most_bytes(config)


def _most_bytes(config: TrainConfig) -> int:
    """More than the checkpoints of a GPT take on disk."""
    config = with_preset(config)
    shape = gpt_config(config.model, vocab_size=config.data.vocab_size or 1)
    embeddings = (2 + shape.value_tables) * (shape.vocab_size + 64) + shape.max_position_embeddings
    layers = shape.n_layers * (4 * shape.d_model + 3 * shape.d_ff + 16)
    # Weights and two moments, of 4 bytes each.
    return 4 * 3 * shape.d_model * (embeddings + layers) * (config.run.keep_checkpoints + config.run.keep_best + 1)
