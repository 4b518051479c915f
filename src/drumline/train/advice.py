"""What some runs are told at their start: choices that cannot work, and what their machine and length mean."""

from __future__ import annotations

import os

import torch

from drumline.config import OPTIMIZERS, TrainConfig
from drumline.lazy import room
from drumline.units import counted

_BUSY = 1.5
"""Above this load per core, the cores are not free for a run, and it says so."""
_FEW = 20


def check_choices(config: TrainConfig, device: torch.device) -> None:
    """Refuse a custom model or optimizer, or float8, that cannot work."""
    if config.model.model != "gpt":
        from drumline.model import checked_plugin

        checked_plugin(config)
    if config.optim.optimizer not in (None, *OPTIMIZERS):
        from drumline.optim import checked_optimizer

        checked_optimizer(config.optim.optimizer)
    if config.run.fp8:
        room("kernels").check_fp8(config, device)


def advice(config: TrainConfig, *, device: str, total_steps: int) -> list[str]:
    cores, ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    lines = []
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
