"""Restore a run from a checkpoint: on disk or in memory, the newest or one that the user chose; all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drumline.checkpoint.checkpoints import (
    Checkpoint,
    RunState,
    checkpoint_paths,
    read_state,
)
from drumline.checkpoint.newest import Open, find, leave_behind, manifest_sha256, verified_together
from drumline.checkpoint.state import optimizer_state, weights
from drumline.checkpoint.storage import kind_of
from drumline.errors import CheckpointError
from drumline.files import RunFolder
from drumline.parallel import World, waiting_for
from drumline.pieces import (
    Here,
    Shapes,
    Stored,
    exchange,
    fill_own,
    is_spread,
    reading,
    room_like,
    shapes_as_json,
    shapes_from_json,
    stored_in,
)
from drumline.snapshots import Collected, Snapshot, Snapshots, collected

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

    A rank that has the state reads it and sends it to the others, which need not see its disk. Where the state is
    spread over the ranks, each of them reads its own rows, and only what it does not see comes from others.
    """

    def found(opened: Open) -> Checkpoint | None:
        checkpoint = find(resume_from, folder, say=say, opened=opened)
        if checkpoint is None or checkpoint.tensors is None:
            return checkpoint
        from drumline.checkpoint.export import adopted

        return adopted(checkpoint, model, optimizer, facts=facts, say=say)

    had_some = world.is_rank0 and bool(checkpoint_paths(folder.checkpoints))
    on_disk = verified_together(found, world)
    disk_step = int(world.gather(_step(on_disk))[0])
    check = partial(_check_same_run, facts=facts, allow_change=allow_change)
    from_memory = snapshots if resume_from == "auto" else None
    if is_spread(model.parameters()):
        state, where = _resume_shares(on_disk, disk_step, from_memory, world, model, optimizer, check=check, say=say)
    else:
        state, where = _resume_whole(on_disk, disk_step, from_memory, world, model, optimizer, check=check, say=say)
    if state is None:
        say("warning: no valid checkpoint is left: starting again from step 0") if had_some else None
        return None
    if resume_from != "auto":  # existing snapshots belong to where the run was, not to where it resumes from
        if world.is_rank0:
            assert on_disk is not None
            leave_behind(folder, on_disk, say=say)
            with suppress(OSError):  # a failing disk: restarted ranks would do the same again
                folder.resumed.touch()
        if snapshots and world.place.local_rank == 0:
            snapshots.clear()
    say(f"resuming from {where} (step {state.step:,})")
    return state


Check = Callable[[Checkpoint], None]


def _resume_whole(
    on_disk: Checkpoint | None,
    disk_step: int,
    snapshots: Snapshots | None,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    check: Check,
    say: Say,
) -> tuple[RunState | None, str]:
    """Every rank has the whole state: one of them reads it. Returns also from where."""
    looks = world.place.local_rank == 0  # one rank per host
    snapshot = snapshots.newest(warn=say, device=world.device) if snapshots and looks else None
    in_memory = _of_snapshot(snapshot, say)
    memory_step, holder = max((each, -rank) for rank, each in enumerate(world.gather(_step(in_memory))))
    source = -holder if memory_step > disk_step else 0
    if max(memory_step, disk_step) < 0:
        return None, ""
    newest = in_memory if memory_step > disk_step else on_disk

    def read() -> dict[str, Any]:
        if world.rank != source:
            return {}
        assert newest is not None
        check(newest)
        load(newest, model=model, optimizer=optimizer)
        _check_still_there(snapshot if newest is in_memory else None)
        return newest.state.__dict__

    state = RunState(**world.gather(world.on_all_ranks(read))[source])
    share(model, optimizer, world, source=source)
    return state, str(newest.path if newest and world.rank == source else f"the memory of rank {source}'s host")


def _resume_shares(
    on_disk: Checkpoint | None,
    disk_step: int,
    snapshots: Snapshots | None,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    check: Check,
    say: Say,
) -> tuple[RunState | None, str]:
    """Every rank has some rows, and reads those. Returns also from where."""
    memory: Collected | None = None
    if any(world.gather(snapshots is not None)):
        memory = collected(snapshots, world, after=disk_step, warn=say)
    if memory is not None:
        newest = Checkpoint(memory.folder, RunState(**memory.about))
        world.on_all_ranks(lambda: check(newest))
        _load_shares(newest, memory.stored, memory.here, memory.shapes, world, model, optimizer)
        world.on_all_ranks(memory.check_still_there)
        return newest.state, "the memory of " + ("this host" if memory.hosts == 1 else f"{memory.hosts} hosts")
    if disk_step < 0:
        return None, ""
    world.on_all_ranks(lambda: check(on_disk) if on_disk else None)
    state = load_shares(on_disk, world, model=model, optimizer=optimizer)
    return state, str(on_disk.path if on_disk else "the checkpoint of rank 0")


def load_shares(
    checkpoint: Checkpoint | None, world: World, *, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> RunState:
    """Load rank 0's verified checkpoint into a model of which each rank has some rows; all ranks call it."""

    def shapes() -> tuple[Stored | None, list[Any]]:
        if checkpoint is None:
            return None, []
        stored = _stored(checkpoint)
        manifest = manifest_sha256(checkpoint.path) if checkpoint.tensors is None else None
        return stored, [
            str(checkpoint.path.absolute()),
            manifest,
            checkpoint.state.__dict__,
            shapes_as_json(stored.shapes),
        ]

    stored, own = world.on_all_ranks(shapes)
    path, manifest, state, listed = world.gather(own)[0]
    sees = stored is None and manifest is not None and manifest_sha256(Path(path)) == manifest
    stored = world.on_all_ranks(lambda: stored_in(Path(path)) if sees else stored)
    every = {name: [(0, shape[0] if shape else 1)] for name, _, shape in listed}
    here = [every if sees else {} for sees in world.gather(stored is not None)]
    there = Checkpoint(Path(path), RunState(**state))
    _load_shares(there, stored or Stored(()), here, shapes_from_json(listed), world, model, optimizer)
    return there.state


def _load_shares(
    checkpoint: Checkpoint,
    stored: Stored,
    here: Here,
    shapes: Shapes,
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    def own() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        state = _checked(shapes, checkpoint, model, optimizer)
        known = weights(model)
        with reading(checkpoint.path):
            fill_own({**known, **state}, stored, world)
        return known, state

    known, state = world.on_all_ranks(own)
    exchange({**known, **state}, stored, here, world)
    if optimizer is not None:
        load_optimizer(state, checkpoint.state.optimizer, model, optimizer)


def _of_snapshot(snapshot: Snapshot | None, say: Say) -> Checkpoint | None:
    if snapshot is None:
        return None
    try:
        Stored.in_memory(snapshot.tensors).check_whole()
    except ValueError as error:  # of a run that was spread over several hosts
        say(f"the snapshot of step {snapshot.found.step:,} on this host is not used: {error}")
        return None
    return Checkpoint(snapshot.found.slots[0].parent, RunState(**snapshot.about), snapshot.tensors)


def _check_still_there(snapshot: Snapshot | None) -> None:
    if snapshot and not snapshot.is_still_there():
        where = snapshot.found.slots[0].parent
        raise CheckpointError(f"the snapshot in {where} was written to while it was read", fix="run the command again")


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
    stored = _stored(checkpoint)
    state = _checked(stored.shapes, checkpoint, model, optimizer)
    with reading(checkpoint.path), torch.no_grad():
        for name, tensor in {**weights(model), **state}.items():
            stored.fill(name, tensor)
    if optimizer is not None:
        load_optimizer(state, checkpoint.state.optimizer, model, optimizer)


def _checked(
    stored: Shapes, checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Memory for the optimizer state in a checkpoint, which is one of this model."""
    _check_model({name: shape for name, (_, shape) in stored.items() if kind_of(name) == "model"}, checkpoint, model)
    if optimizer is None:
        return {}
    _check_optimizer([*(name for name in stored if "/" in name), *checkpoint.state.optimizer], checkpoint, model)
    wanted = {name: about for name, about in stored.items() if kind_of(name) == "optimizer"}
    return _room_for(wanted, model, optimizer)


def share(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, *, source: int) -> None:
    """Copy one rank's weights and optimizer state to all ranks."""
    if not world.is_group:
        return
    with waiting_for("the weights of the checkpoint"):
        world.broadcast(list(weights(model).values()), source=source)
    tensors, scalars = optimizer_state(model, optimizer) if world.rank == source else ({}, {})
    own = shapes_as_json({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    shapes, scalars = world.gather([own, scalars])[source]
    if world.rank != source:
        load_optimizer(_room_for(shapes_from_json(shapes), model, optimizer), scalars, model, optimizer)
        tensors, _ = optimizer_state(model, optimizer)
    world.broadcast([tensors[name] for name, _, _ in shapes], source=source)


def _room_for(stored: Shapes, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Memory for an optimizer's state, where it will be used: a detour through the host takes longer than all else."""
    parameters = dict(model.named_parameters())
    # Fused optimizers keep their step count on the device; the others on the CPU.
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)

    def room(key: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        kind, name = key.split("/", 1)
        if kind == "step" and not counts_on_device:
            return torch.empty(shape, dtype=dtype)
        return room_like(parameters[name], dtype, shape)

    return {key: room(key, *about) for key, about in stored.items()}


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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a verified checkpoint, by name, on the CPU."""
    stored = stored_in(folder)
    with reading(folder):
        return {name: stored.read(name) for name in stored.shapes if kind_of(name) == "model"}


def _stored(checkpoint: Checkpoint) -> Stored:
    return stored_in(checkpoint.path) if checkpoint.tensors is None else Stored.in_memory(checkpoint.tensors)
