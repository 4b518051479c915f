"""A checkpoint as one .pt file for sharing, which torch.load(file, weights_only=True) reads anywhere; and files that
other scripts have saved with torch.save, as checkpoints."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from tempfile import NamedTemporaryFile
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from torch import Tensor, nn

from drumline.checkpoint.checkpoints import FORMAT, Checkpoint, RunState
from drumline.checkpoint.newest import SINGLE_FILE
from drumline.checkpoint.state import weights
from drumline.checkpoint.storage import kind_of
from drumline.errors import CheckpointError
from drumline.files import flush
from drumline.pieces import reading, stored_in


def single_file_name(step: int) -> str:
    return f"checkpoint_step_{step}{SINGLE_FILE}"


def write_single_file(
    checkpoint: Checkpoint, path: Path, *, settings: dict[str, Any] | None = None, tokenizer: str | None = None
) -> None:
    """Tensors and plain values: {"format", "run", "model": {name: tensor}, "optimizer": {kind/name: ...}, "sha256"}.

    settings, tokenizer: of its run, if that has any; in the file under the same names
    """
    stored = stored_in(checkpoint.path)
    tensors = {name: _room_on_disk(*about, path.parent) for name, about in stored.shapes.items()}
    with reading(checkpoint.path):
        for name, tensor in tensors.items():
            stored.fill(name, tensor)
    run = asdict(checkpoint.state)
    content: dict[str, Any] = {"format": FORMAT, "run": run, "sha256": _sha256(run, tensors)}
    content |= {"settings": settings, "tokenizer": tokenizer}
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


def _room_on_disk(dtype: torch.dtype, shape: torch.Size, folder: Path) -> Tensor:
    """Memory for a tensor that the disk has room for and the host need not have: all of them are saved at once.

    OSError: there is no room
    """
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    with NamedTemporaryFile(dir=folder, prefix=".tensor-") as file:  # what is mapped stays without its name
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk would kill the process when it writes there
        memory = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    return memory.view(dtype).view(shape)


def carried(path: Path) -> dict[str, Any]:
    """The settings and the tokenizer in an exported file; {} if it has none."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {key: content[key] for key in ("settings", "tokenizer") if content.get(key)}
    except Exception:  # whatever is wrong with it, `open_single_file` will say so
        return {}


def open_single_file(path: Path) -> Checkpoint:
    """Verify and read a .pt file, drumline's or of a script of its own; nothing in it is executed."""
    try:
        if is_zipfile(path):
            with ZipFile(path) as whole:  # torch.load does not verify checksums
                if (bad := whole.testzip()) is not None:
                    raise ValueError(f"{bad} is corrupt")
        content = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(content, dict) and "format" not in content:
            return Foreign(path, RunState(step=0, facts={}), _weights_in(content, path), content)
        tensors = {**content["model"], **content["optimizer"]}
        state = RunState(**content["run"])
        if not isinstance(state.step, int) or not all(isinstance(v, dict) for v in (state.facts, state.optimizer)):
            raise TypeError("wrong types in its run state")
        if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()):
            raise TypeError("it contains something other than tensors")
        if content["sha256"] != _sha256(content["run"], tensors):
            raise ValueError("it does not match its own hash")
    except CheckpointError:
        raise
    except UnpicklingError:
        raise CheckpointError(
            f"{path} has Python objects besides tensors, numbers and text, which could run any code when loaded",
            fix="load it where it was made, and save only state_dict() of model and optimizer, and numbers",
        ) from None
    except Exception as error:  # a damaged or foreign archive can fail in any way
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} is damaged, or not a drumline checkpoint: {why}",
            fix="write it again with `drumline checkpoint export RUN`, or resume from the run itself",
        ) from None
    return Checkpoint(path, state, tensors)


@dataclass(frozen=True)
class Foreign(Checkpoint):
    """A file that another script saved with torch.save: weights, and maybe optimizer state and a position."""

    content: dict[str, Any] = field(default_factory=dict)


_WEIGHTS = ("model", "MODEL_STATE", "model_state_dict", "model_state", "state_dict", "weights")
_OPTIMIZER = ("optimizer", "OPTIMIZER_STATE", "optimizer_state_dict", "optimizer_state", "optim")
_STEP = ("step", "global_step", "iteration", "iter_num", "iter", "steps")
_EPOCH = ("EPOCHS_RUN", "epochs_run", "epoch", "epochs")
_WRAPPERS = r"^((module|_orig_mod)\.)+"
"""What DDP and torch.compile put before the names of weights."""


def _weights_in(content: dict[str, Any], path: Path) -> dict[str, Tensor]:
    weights = _first(content, _WEIGHTS, content)
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items() if isinstance(weights, dict) else ():
        if isinstance(name, str) and isinstance(tensor, Tensor):
            tensors[re.sub(_WRAPPERS, "", name)] = tensor
    if not tensors:
        raise CheckpointError(
            f"{path} has no weights: it has {', '.join(map(str, content)) or 'nothing'}",
            fix='save the model\'s state_dict(), alone or as torch.save({"model": ..., "optimizer": ..., "step": ...})',
        )
    return tensors


def adopted(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    facts: dict[str, Any],
    say: Callable[[str], None],
) -> Checkpoint:
    """A foreign file as a checkpoint of this run: what it does not have begins anew. Others stay as they are."""
    if not isinstance(checkpoint, Foreign):
        return checkpoint
    content, path = checkpoint.content, checkpoint.path
    known, shared = weights(model), model.state_dict().keys()
    tensors = {name: each for name, each in (checkpoint.tensors or {}).items() if name in known or name not in shared}
    epochs = _first(content, _EPOCH)
    steps_per_epoch = facts.get("items_per_epoch", 0) / facts.get("global_batch_size", 1)
    step = _first(content, _STEP, 0 if epochs is None else math.ceil(float(epochs) * steps_per_epoch - 1e-6))
    state = _first(content, _OPTIMIZER)
    moments, scalars = ({}, {}) if state is None else _optimizer_in(state, model, optimizer, path)
    lacks = ["" if state else "optimizer state", "" if step or epochs is not None else "a step"]
    missing = " or ".join(filter(None, lacks))
    say(
        f"{path} was saved by another program{f', without {missing}' if missing else ''}: "
        "it does not say on which data and with which batch size"
    )
    # Without a position, these are weights to start from. A loss scaler, if this run has one, begins anew.
    scaler = torch.amp.GradScaler("cpu").state_dict()
    run = RunState(step=int(step), facts=dict(facts), scaler=scaler, optimizer=scalars)
    return Checkpoint(path, run, {**tensors, **moments})


def _first(content: dict[str, Any], names: Sequence[str], otherwise: Any = None) -> Any:
    return next((content[name] for name in names if name in content and content[name] is not None), otherwise)


def _optimizer_in(
    state: Any, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """torch's numbered optimizer state by "kind/parameter": the numbers follow the order of the optimizer's groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        by_number = dict(state["state"])
    except (KeyError, TypeError):
        numbers, by_number = [], {}
    if len(numbers) != len(own):
        raise CheckpointError(
            f"{path} has the state of an optimizer of {len(numbers)} parameters, this one has {len(own)}",
            fix="use the same optimizer and model, or save the file without the optimizer to start it anew",
        )
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for number, parameter in zip(numbers, own, strict=True):
        for kind, value in by_number.get(number, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{kind}/{names[id(parameter)]}"] = value
            elif value is not None:
                scalars[f"{kind}/{names[id(parameter)]}"] = value
    return tensors, scalars


def _sha256(run: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(repr(sorted(run.items())).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()
