"""Restore a run from a checkpoint: on disk or in memory, the newest or one that the user chose; all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drumline.checkpoint.checkpoints import (
    MANIFEST,
    Checkpoint,
    RunState,
    checkpoint_paths,
    open_checkpoint,
    read_state,
)
from drumline.checkpoint.newest import newest_valid, set_aside
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.state import optimizer_state, weights
from drumline.checkpoint.storage import DTYPES, SUFFIX, kind_of
from drumline.errors import CheckpointError
from drumline.files import RunFolder
from drumline.parallel import World, waiting_for
from drumline.snapshots import Snapshot, Snapshots

SINGLE_FILE = ".pt"
"""The suffix of exported checkpoints."""
SINGLE_FILES = (SINGLE_FILE, ".pth")
"""Suffixes of files that scripts save with torch.save."""
Say = Callable[[str], None]


def resume(
    resume_from: str,
    folder: RunFolder,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    facts: dict[str, Any],
    allow_change: Sequence[str],
    snapshots: Snapshots | None,
    say: Say,
) -> RunState | None:
    """Restore every rank's model and optimizer to where the run is; None: it has not started.

    A rank that has the state reads it and sends it to the others, which need not see its disk.
    """

    def found() -> Checkpoint | None:
        checkpoint = find(resume_from, folder, say=say)
        if checkpoint is None or checkpoint.tensors is None:
            return checkpoint
        from drumline.checkpoint.export import adopted

        return adopted(checkpoint, model, optimizer, facts=facts, say=say)

    had_some = world.is_rank0 and bool(checkpoint_paths(folder.checkpoints))
    on_disk = world.on_all_ranks(lambda: found() if world.is_rank0 else None)
    looks = world.place.local_rank == 0  # one rank per host
    snapshot = _newest(snapshots if looks and resume_from == "auto" else None, world, say)
    in_memory = _of_snapshot(snapshot)
    steps = world.gather([_step(on_disk), _step(in_memory)])
    disk_step, (memory_step, holder) = steps[0][0], max((each[1], -rank) for rank, each in enumerate(steps))
    source = -holder if memory_step > disk_step else 0
    if max(memory_step, disk_step) < 0:
        say("warning: no valid checkpoint is left: starting again from step 0") if had_some else None
        return None
    newest = in_memory if memory_step > disk_step else on_disk

    def read() -> dict[str, Any]:
        if world.rank != source:
            return {}
        assert newest is not None
        _check_same_run(newest, facts, allow_change)
        load(newest, model=model, optimizer=optimizer)
        _check_still_there(snapshot if newest is in_memory else None)
        return newest.state.__dict__

    state = RunState(**world.gather(world.on_all_ranks(read))[source])
    if resume_from != "auto":  # existing snapshots belong to where the run was, not to where it resumes from
        if world.is_rank0:
            assert on_disk is not None
            leave_behind(folder, on_disk, say=say)
            with suppress(OSError):  # a failing disk: restarted ranks would do the same again
                folder.resumed.touch()
        if snapshots and looks:
            snapshots.clear()
    share(model, optimizer, world, source=source)
    where = newest.path if newest and world.rank == source else f"the memory of rank {source}'s host"
    say(f"resuming from {where} (step {state.step:,})")
    return state


def _newest(snapshots: Snapshots | None, world: World, say: Say) -> Snapshot | None:
    return snapshots.newest(warn=say, device=world.device) if snapshots else None


def _of_snapshot(snapshot: Snapshot | None) -> Checkpoint | None:
    if snapshot is None:
        return None
    return Checkpoint(snapshot.found.slots[0].parent, RunState(**snapshot.about), snapshot.tensors)


def _check_still_there(snapshot: Snapshot | None) -> None:
    if snapshot and not snapshot.is_still_there():
        where = snapshot.found.slots[0].parent
        raise CheckpointError(f"the snapshot in {where} was written to while it was read", fix="run the command again")


def find(resume_from: str, folder: RunFolder, *, say: Say) -> Checkpoint | None:
    """What `resume_from` refers to: auto (the newest valid checkpoint), a step, a checkpoint, a run or a .pt."""
    if resume_from == "auto":
        return newest_valid(folder.checkpoints, warn=say)
    check_named(resume_from, folder)
    path = _named(resume_from, folder)
    if path.suffix in SINGLE_FILES:
        from drumline.checkpoint.export import open_single_file

        return open_single_file(path)
    if (path / MANIFEST).exists():
        return open_checkpoint(path)
    newest = newest_valid(RunFolder(path).checkpoints, warn=say)
    if newest is None:
        raise CheckpointError(f"the run {path} has no valid checkpoint", fix="start without --resume_from")
    return newest


def check_named(resume_from: str, folder: RunFolder) -> None:
    """Refuse immediately what cannot be resumed from; whether it is valid is checked when it is opened."""
    path = _named(resume_from, folder)
    if path.suffix in SINGLE_FILES and path.is_file():
        return
    if not (path / MANIFEST).exists() and not checkpoint_paths(RunFolder(path).checkpoints):
        steps = ", ".join(str(step_of(p)) for p in checkpoint_paths(folder.checkpoints)) or "none"
        raise CheckpointError(
            f"--resume_from {resume_from} is neither a checkpoint nor a run with one (steps saved in {folder.path}: "
            f"{steps})",
            fix="use a step, RUN/checkpoints/step-NNNNNNNN, RUN, or a .pt file from `drumline checkpoint export`",
        )


def leave_behind(folder: RunFolder, start: Checkpoint, *, say: Say) -> None:
    """Rename checkpoints that are newer than `start`, which the run no longer continues from."""
    for path in checkpoint_paths(folder.checkpoints):
        is_start = path.absolute() == start.path.absolute()
        if step_of(path) >= start.step and not is_start:
            say(f"{path.name} is newer than the step resumed from: {set_aside(path, 'superseded')}")


def _named(resume_from: str, folder: RunFolder) -> Path:
    return folder.checkpoint(int(resume_from)) if resume_from.isdigit() else Path(resume_from)


def check_same_run(folder: RunFolder, facts: dict[str, Any], allow_change: Sequence[str]) -> None:
    """Refuse immediately to resume a run with other facts; its newest checkpoint is verified when it is opened."""
    for path in reversed(checkpoint_paths(folder.checkpoints)):
        try:
            checkpoint = Checkpoint(path, read_state(path))
        except CheckpointError:
            continue
        _check_same_run(checkpoint, facts, allow_change)
        return


def _check_same_run(checkpoint: Checkpoint, facts: dict[str, Any], allow_change: Sequence[str]) -> None:
    was = checkpoint.state.facts
    if not was:  # weights from elsewhere, for any data
        return
    names = [name for name, value in facts.items() if was.get(name) != value and name not in allow_change]
    changed = [f"{name} {was.get(name)} -> {facts[name]}" for name in names if name != "train_data"]
    if "train_data" in names:  # two hashes would say no more
        changed.insert(0, "the training data are not those that it began with")
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} is from a run with different settings ({'; '.join(changed)})",
            fix="use the same settings to resume it, or start a new run in another run_dir",
        )


def _step(checkpoint: Checkpoint | None) -> int:
    return checkpoint.step if checkpoint else -1


def load(checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load a verified checkpoint into a model and, for training, its optimizer."""
    read = checkpoint.tensors
    stored = {n: (t.dtype, t.shape) for n, t in read.items()} if read is not None else stored_shapes(checkpoint.path)
    _check_model({name: shape for name, (_, shape) in stored.items() if kind_of(name) == "model"}, checkpoint, model)
    _fill(weights(model), checkpoint)
    if optimizer is not None:
        _check_optimizer([*(name for name in stored if "/" in name), *checkpoint.state.optimizer], checkpoint, model)
        wanted = {name: about for name, about in stored.items() if kind_of(name) == "optimizer"}
        tensors = _room_for(wanted, model, optimizer)
        _fill(tensors, checkpoint)
        load_optimizer(tensors, checkpoint.state.optimizer, model, optimizer)


def _fill(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    with torch.no_grad():
        if checkpoint.tensors is not None:
            for name, tensor in tensors.items():
                tensor.copy_(checkpoint.tensors[name])
        elif tensors:
            read_tensors(tensors, checkpoint.path)


def share(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, *, source: int) -> None:
    """Copy one rank's weights and optimizer state to all ranks."""
    if not world.is_group:
        return
    with waiting_for("the weights of the checkpoint"):
        world.broadcast(list(weights(model).values()), source=source)
    tensors, scalars = optimizer_state(model, optimizer) if world.rank == source else ({}, {})
    own: list[Any] = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    shapes, scalars = world.gather([own, scalars])[source]
    if world.rank != source:
        stored = {name: (getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in shapes}
        load_optimizer(_room_for(stored, model, optimizer), scalars, model, optimizer)
        tensors, _ = optimizer_state(model, optimizer)
    world.broadcast([tensors[name] for name, _, _ in shapes], source=source)


def _room_for(
    stored: dict[str, tuple[torch.dtype, torch.Size]], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Memory for an optimizer's state, where it will be used: a detour through the host takes longer than all else."""
    parameters = dict(model.named_parameters())
    # Fused optimizers keep their step count on the device; the others on the CPU.
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

    def device(key: str) -> torch.device:
        kind, name = key.split("/", 1)
        return parameters[name].device if kind != "step" or counts_on_device else torch.device("cpu")

    return {key: torch.empty(shape, dtype=dtype, device=device(key)) for key, (dtype, shape) in stored.items()}


def load_optimizer(
    tensors: dict[str, Tensor], scalars: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """tensors: where the optimizer uses them"""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in {**tensors, **scalars}.items():
        kind, name = key.split("/", 1)
        optimizer.state[parameters[name]][kind] = value


def _check_model(stored: dict[str, torch.Size], checkpoint: Checkpoint, model: nn.Module) -> None:
    here = weights(model)
    missing, extra = sorted(here.keys() - stored.keys()), sorted(stored.keys() - here.keys())
    shapes = [
        f"{name}: {tuple(stored[name])} there, {tuple(tensor.shape)} here"
        for name, tensor in here.items()
        if name in stored and stored[name] != tensor.shape
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"{checkpoint.path} is from a different model: {len(missing)} tensors missing, {len(extra)} unknown, "
            f"{len(shapes)} with another shape (first: {(missing + extra + shapes)[0]})",
            fix="use the settings of the checkpoint's run (see its config.toml)",
        )


def _check_optimizer(names: list[str], checkpoint: Checkpoint, model: nn.Module) -> None:
    unknown = {name.partition("/")[2] for name in names} - dict(model.named_parameters()).keys()
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path} is from a different model: it has optimizer state for {len(unknown)} parameters not "
            f"here (first: {min(unknown)})",
            fix="use the settings of the checkpoint's run (see its config.toml)",
        )


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors on any device from the files of a verified checkpoint."""
    missing = set(tensors)
    with _reading(folder), torch.no_grad():
        for path in _files(folder):
            with safe_open(path, framework="pt") as file:
                for name in missing.intersection(file.keys()):
                    stored = file.get_tensor(name)
                    if stored.shape != tensors[name].shape:
                        raise ValueError(f"{name} has shape {tuple(stored.shape)}, not {tuple(tensors[name].shape)}")
                    tensors[name].copy_(stored)
                    missing.remove(name)
        if missing:
            raise KeyError(f"{min(missing)} is missing")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a verified checkpoint, by name, on the CPU."""
    shapes = {name: about for name, about in stored_shapes(folder).items() if kind_of(name) == "model"}
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
    read_tensors(tensors, folder)
    return tensors


def stored_shapes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """The tensors in a checkpoint."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    shapes: dict[str, tuple[torch.dtype, torch.Size]] = {}
    with _reading(folder):
        for path in _files(folder):
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    about = file.get_slice(name)
                    shapes[name] = dtypes[about.get_dtype()], torch.Size(about.get_shape())
    return shapes


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn errors into CheckpointError: a file with the right hash may still contain anything."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"the tensors in {folder} cannot be read ({type(error).__name__}: {error})",
            fix="resume from another checkpoint of the run",
        ) from None
