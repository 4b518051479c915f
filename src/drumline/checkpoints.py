"""Checkpoints: complete or not there at all, verified before anything is read in, and without pickle.

    step-00005000/
      model.safetensors       weights
      optimizer.safetensors   optimizer state, one tensor per kind and parameter: "exp_avg/head.weight"
      run.json                step and the little that is not a tensor
      manifest.json           size and sha256 of every file above

A checkpoint is written aside, flushed, hashed and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drumline.cluster import World
from drumline.disk import file_sha256, flush
from drumline.errors import CheckpointError
from drumline.run_folder import CHECKPOINT_PREFIX, RunFolder

MODEL, OPTIMIZER, RUN, MANIFEST = "model.safetensors", "optimizer.safetensors", "run.json", "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    step: int
    scaler: dict[str, Any]
    """float16's loss scaler; {} for other formats."""
    facts: dict[str, Any]
    """What must be the same for the run to go on as the same run."""


def save(
    folder: RunFolder,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: dict[str, Any],
    facts: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step`; when this returns, it will survive a power cut."""
    final = folder.checkpoint(step)
    aside = final.with_name(f".{final.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        state, scalars = optimizer_state(model, optimizer)
        save_file({name: tensor.contiguous() for name, tensor in weights(model).items()}, aside / MODEL)
        save_file(state, aside / OPTIMIZER)
        run = {"format": FORMAT, "step": step, "scaler": scaler, "facts": facts, "optimizer": scalars}
        (aside / RUN).write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
        files = {
            name: {"bytes": (aside / name).stat().st_size, "sha256": file_sha256(aside / name)}
            for name in (MODEL, OPTIMIZER, RUN)
        }
        (aside / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=2) + "\n", encoding="utf-8")
        for name in (MODEL, OPTIMIZER, RUN, MANIFEST):
            flush(aside / name)
        flush(aside)
        if final.exists():  # a run that went back to an earlier step passes here again
            shutil.rmtree(final)
        aside.rename(final)
        flush(final.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify every file of a checkpoint against its manifest; CheckpointError names what is wrong."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {name: (int(files[name]["bytes"]), str(files[name]["sha256"])) for name in (MODEL, OPTIMIZER, RUN)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from None
    for name, (size, sha256) in expected.items():
        file = path / name
        if not file.is_file():
            raise _damaged(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise _damaged(path, f"{name} has {file.stat().st_size} bytes, not {size}")
        if file_sha256(file) != sha256:
            raise _damaged(path, f"{name} does not have the hash its manifest gives")
    run = json.loads((path / RUN).read_text(encoding="utf-8"))
    if run["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {run['format']}, this drumline reads {FORMAT}", fix="upgrade drumline"
        )
    return Checkpoint(path, step=int(run["step"]), scaler=dict(run["scaler"]), facts=dict(run["facts"]))


def load(checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Read a verified checkpoint into a model and, for training on, its optimizer."""
    _load_weights(checkpoint.path / MODEL, model)
    if optimizer is not None:
        scalars = json.loads((checkpoint.path / RUN).read_text(encoding="utf-8"))["optimizer"]
        _load_optimizer(load_file(checkpoint.path / OPTIMIZER), scalars, model, optimizer)


def share(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Give every rank rank 0's weights and optimizer state."""
    if world.store is None:
        return
    world.broadcast(list(weights(model).values()))
    tensors, scalars = optimizer_state(model, optimizer) if world.is_main else ({}, {})
    own: list[Any] = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    shapes, scalars = world.on_main(lambda: (own, scalars))
    if not world.is_main:
        empty = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in shapes}
        _load_optimizer(empty, scalars, model, optimizer)
        tensors, _ = optimizer_state(model, optimizer)
    world.broadcast([tensors[name] for name, _, _ in shapes])


def checkpoint_paths(folder: RunFolder) -> list[Path]:
    """Complete checkpoints by name, oldest first; not verified."""
    found = folder.checkpoints.glob(f"{CHECKPOINT_PREFIX}*")
    return sorted(path for path in found if path.name.removeprefix(CHECKPOINT_PREFIX).isdigit())


def newest_valid(folder: RunFolder, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that verifies; damaged ones are named and set aside on the way."""
    for path in reversed(checkpoint_paths(folder)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            set_aside = path.with_name(f"{path.name}.damaged")
            shutil.rmtree(set_aside, ignore_errors=True)
            path.rename(set_aside)
            warn(f"{error.problem}; set aside as {set_aside.name}, trying the one before")
    return None


def find(resume_from: str, folder: RunFolder, *, warn: Callable[[str], None]) -> Checkpoint | None:
    """What `resume_from` means: auto (the run's newest valid checkpoint, if any), a checkpoint, or another run."""
    if resume_from == "auto":
        return newest_valid(folder, warn=warn)
    check_resume(resume_from)
    path = Path(resume_from)
    if (path / MANIFEST).exists():
        return open_checkpoint(path)
    found = newest_valid(RunFolder(path), warn=warn)
    if found is None:
        raise CheckpointError(f"the run {path} has no valid checkpoint", fix="start without --resume_from")
    return found


def check_resume(resume_from: str) -> None:
    """Refuse at once what cannot be resumed from; whether it is whole is found out when it is opened."""
    path = Path(resume_from)
    if resume_from != "auto" and not (path / MANIFEST).exists() and not checkpoint_paths(RunFolder(path)):
        raise CheckpointError(
            f"--resume_from {resume_from} is neither a checkpoint nor a run with one",
            fix="give RUN/checkpoints/step-NNNNNNNN or RUN; `drumline runs` lists the runs",
        )


def prune(folder: RunFolder, *, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what killed savers left behind."""
    for path in checkpoint_paths(folder)[:-keep]:
        shutil.rmtree(path)
    for leftover in folder.checkpoints.glob(f".{CHECKPOINT_PREFIX}*.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor a model must keep, by name; one that is shared (tied embeddings) appears once, by its first name."""
    seen: set[int] = set()
    kept: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach()
    return kept


def weights_sha256(model: nn.Module) -> str:
    """The fingerprint of a model: over names, dtypes, shapes and bytes in name order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(model).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state as tensors by "kind/parameter", and what of it is not a tensor."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{kind}/{name}"] = value.contiguous()
            else:
                scalars[f"{kind}/{name}"] = value
    return tensors, scalars


def _load_weights(path: Path, model: nn.Module) -> None:
    stored, here = load_file(path), weights(model)
    missing, extra = sorted(here.keys() - stored.keys()), sorted(stored.keys() - here.keys())
    shapes = [
        f"{n}: {tuple(stored[n].shape)} there, {tuple(here[n].shape)} here"
        for n in here
        if n in stored and stored[n].shape != here[n].shape
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"{path.parent} is of another model: {len(missing)} tensors missing, {len(extra)} unknown, "
            f"{len(shapes)} of another shape (first: {(missing + extra + shapes)[0]})",
            fix="give the settings the checkpoint's run had (its config.toml has them)",
        )
    with torch.no_grad():
        for name, tensor in here.items():
            tensor.copy_(stored[name])


def _load_optimizer(
    tensors: dict[str, Tensor], scalars: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    parameters = dict(model.named_parameters())
    # Fused optimizers count their steps on the device; the others want that count on the CPU.
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    optimizer.state.clear()
    for key, tensor in tensors.items():
        kind, name = key.split("/", 1)
        moves = tensor.shape == parameters[name].shape or counts_on_device
        optimizer.state[parameters[name]][kind] = tensor.to(parameters[name].device) if moves else tensor
    for key, value in scalars.items():
        kind, name = key.split("/", 1)
        optimizer.state[parameters[name]][kind] = value


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged: {what}", fix="resume from another checkpoint of the run")
