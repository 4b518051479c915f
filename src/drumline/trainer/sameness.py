"""Whether it is the same run: the same data on every rank, and the run that a folder has."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drumline.files import RunFolder, is_unfinished, numbered_folder, replace_text
from drumline.parallel import own_pulse
from drumline.trainer.samples import Source

_AT_RANDOM = "drawn at random"
ACCUMULATED = "gradient_accumulation_steps"


def fingerprint(source: Source) -> str:
    """A hash of a few samples; the same for datasets that draw a sample anew each time it is read."""
    numbers = sorted({0, len(source) // 2, len(source) - 1})
    with torch.random.fork_rng(devices=[]):
        first, again = ([_digest(source.dataset[number]) for number in numbers] for _ in range(2))
    if first != again:
        return _AT_RANDOM
    return hashlib.sha256("".join(first).encode()).hexdigest()[:12]


def _digest(value: Any) -> str:
    """Of the tensors, arrays, numbers and text in a sample; of anything else only the type counts."""
    if isinstance(value, Mapping):
        return _digest([part for pair in sorted(value.items(), key=lambda pair: str(pair[0])) for part in pair])
    if isinstance(value, list | tuple):
        return hashlib.sha256("".join(map(_digest, value)).encode()).hexdigest()
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        about, content = f"{value.dtype} {value.shape}", np.ascontiguousarray(value).tobytes()
        return hashlib.sha256(about.encode() + content).hexdigest()
    plain = isinstance(value, bool | int | float | str | bytes | None)
    return hashlib.sha256(f"{type(value).__name__} {value if plain else ''}".encode()).hexdigest()


def traits(model: nn.Module, optimizer: torch.optim.Optimizer, data: str) -> dict[str, str]:
    """What makes a run another one, besides its facts: model, optimizer and data."""
    shapes = repr([(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()])
    plain = {name: value for name, value in optimizer.defaults.items() if isinstance(value, int | float | tuple | None)}
    groups = [group.get("lr") for group in optimizer.param_groups]
    return {
        "model": f"{type(model).__name__} {hashlib.sha256(shapes.encode()).hexdigest()[:12]}",
        "optimizer": f"{type(optimizer).__name__} {plain} {groups}",
        "data": data,
    }


def choose_folder(about: dict[str, Any], *, total_steps: int, resume: bool) -> RunFolder:
    """The first of runs/SCRIPT, runs/SCRIPT-2, ... that is free, or has this run with something left to do."""
    return numbered_folder(script_name(), lambda folder: resume and _goes_on(folder, about, total_steps))


def script_name() -> str:
    """The name of the script that this process runs, for its run folder."""
    name = re.sub(r"[^\w.]+", "-", Path(sys.argv[0] if sys.argv else "").stem).strip("-.")
    return name if name not in ("", "c", "__main__") else "trainer"


def _goes_on(folder: RunFolder, about: dict[str, Any], total_steps: int) -> bool:
    if read_about(folder) != json.loads(json.dumps(about)):
        return False
    status = folder.read_status()
    if status.get("state") == "finished":
        return int(status.get("total_steps", 0)) < total_steps
    return not status or is_unfinished(folder) or own_pulse().started_again


def read_about(folder: RunFolder) -> dict[str, Any] | None:
    """What the run of a folder is, as `write_about` has written it; None if no Trainer has."""
    try:
        about = json.loads(folder.trainer.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {ACCUMULATED: 1, **about} if isinstance(about, dict) and "batch_size" in about else None


def write_about(folder: RunFolder, about: dict[str, Any]) -> None:
    """Say what a run is, in its folder, when it starts."""
    if read_about(folder) is None:
        replace_text(folder.trainer, json.dumps(about, indent=2) + "\n")
