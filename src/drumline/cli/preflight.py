"""Whether a run needs the doctor's checks before it starts. A single process on a CPU may not."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from drumline.config import TrainConfig, gpt_config, with_preset

_OPEN_FILES = 1024
"""Below this limit of open files, the doctor warns."""
# Set by a launcher, or read only by processes that use GPUs.
_FOR_THE_DOCTOR = {"RANK", "SLURM_STEP_NUM_TASKS", "CUDA_VISIBLE_DEVICES"}


def is_plain(config: TrainConfig, environ: Mapping[str, str]) -> bool:
    """Whether this process trains alone on a CPU and uses nothing that could be missing or misconfigured.

    Fast and conservative: in case of doubt, the doctor runs.
    """
    run = config.run
    on_gpu = run.device == "cuda" or torch.cuda.is_available()
    if on_gpu or run.compile or run.dtype == "bfloat16" or config.model.model != "gpt":
        return False
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = [environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ]
    if _FOR_THE_DOCTOR & environ.keys() or not all(n.isdigit() and 0 < int(n) <= cores for n in threads):
        return False
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < _OPEN_FILES:
        return False
    folder = Path(run.run_dir or "runs").absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return False
    return shutil.disk_usage(existing).free >= _most_bytes(config)


def _most_bytes(config: TrainConfig) -> int:
    """More than the checkpoints of a GPT take on disk."""
    config = with_preset(config)
    shape = gpt_config(config.model, vocab_size=config.data.vocab_size or 1)
    embeddings = (2 + shape.value_tables) * (shape.vocab_size + 64) + shape.max_position_embeddings
    layers = shape.n_layers * (4 * shape.d_model + 3 * shape.d_ff + 16)
    weights_and_moments = 3 * shape.d_model * (embeddings + layers)
    return 4 * weights_and_moments * (config.run.keep_checkpoints + config.run.keep_best + 1)
