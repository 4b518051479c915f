"""A checkpoint as one .pt file for sharing: torch.load(file, weights_only=True) reads it anywhere."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch import Tensor

from drumline.checkpoint.checkpoints import FORMAT, Checkpoint, RunState
from drumline.checkpoint.restoring import SINGLE_FILE, read_tensors, stored_shapes
from drumline.checkpoint.storage import kind_of
from drumline.errors import CheckpointError
from drumline.files import flush


def single_file_name(step: int) -> str:
    return f"checkpoint_step_{step}{SINGLE_FILE}"


def write_single_file(checkpoint: Checkpoint, path: Path) -> None:
    """Tensors and plain values: {"format", "run", "model": {name: tensor}, "optimizer": {kind/name: ...}, "sha256"}."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in stored_shapes(checkpoint.path).items()}
    read_tensors(tensors, checkpoint.path)
    run = asdict(checkpoint.state)
    content: dict[str, Any] = {"format": FORMAT, "run": run, "sha256": _sha256(run, tensors)}
    for kind in ("model", "optimizer"):
        content[kind] = {name: tensor for name, tensor in tensors.items() if kind_of(name) == kind}
    aside = path.with_name(f".{path.name}.partial")
    if shutil.disk_usage(path.parent).free < sum(tensor.nbytes for tensor in tensors.values()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # torch's writer does not report it as such
    try:
        with aside.open("wb") as file:
            torch.save(content, file)
        flush(aside)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def open_single_file(path: Path) -> Checkpoint:
    """Verify and read a .pt file; nothing in it is executed."""
    try:
        with ZipFile(path) as whole:  # torch.load does not verify checksums
            if (bad := whole.testzip()) is not None:
                raise ValueError(f"{bad} is corrupt")
        content = torch.load(path, map_location="cpu", weights_only=True)
        tensors = {**content["model"], **content["optimizer"]}
        state = RunState(**content["run"])
        if not isinstance(state.step, int) or not all(isinstance(v, dict) for v in (state.facts, state.optimizer)):
            raise TypeError("wrong types in its run state")
        if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()):
            raise TypeError("it contains something other than tensors")
        if content["sha256"] != _sha256(content["run"], tensors):
            raise ValueError("it does not match its own hash")
    except Exception as error:  # a damaged or foreign archive can fail in any way
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged, or not a drumline checkpoint: {why}",
            fix="write it again with `drumline checkpoint export RUN`, or resume from the run itself",
        ) from None
    return Checkpoint(path, state, tensors)


def _sha256(run: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(repr(sorted(run.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()
