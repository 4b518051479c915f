"""Where a run goes on from: its newest checkpoint on disk or in memory, or one that the user names; all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.checkpoint import checkpoints
from drumline.checkpoint.checkpoints import (
    MANIFEST,
    Checkpoint,
    RunState,
    checkpoint_paths,
    newest_valid,
    open_checkpoint,
)
from drumline.checkpoint.export import SINGLE_FILE, open_single_file
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.snapshots import Snapshots
from drumline.errors import CheckpointError
from drumline.files import RunFolder
from drumline.parallel import World

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
    snapshots: Snapshots,
    say: Say,
) -> RunState | None:
    """Bring every rank's model and optimizer to where the run is; None: it has not begun.

    Whoever has the state reads it and gives it to the others: they need not see its disk.
    """
    on_disk = world.together(lambda: find(resume_from, folder, say=say) if world.is_main else None)
    looks = world.place.local_rank == 0  # one rank of each host
    in_memory = snapshots.newest(warn=say) if looks and resume_from == "auto" else None
    steps = world.gather([_step(on_disk), _step(in_memory)])
    disk_step, (memory_step, holder) = steps[0][0], max((each[1], -rank) for rank, each in enumerate(steps))
    source = -holder if memory_step > disk_step else 0
    if max(memory_step, disk_step) < 0:
        return None
    found = in_memory if memory_step > disk_step else on_disk

    def read() -> dict[str, Any]:
        if world.rank != source:
            return {}
        assert found is not None
        _check_same_run(found, facts, allow_change)
        checkpoints.load(found, model=model, optimizer=optimizer)
        return found.state.__dict__

    state = RunState(**world.gather(world.together(read))[source])
    if resume_from != "auto":  # what is there is of where the run was, not of where it is told to go on
        if world.is_main:
            assert on_disk is not None
            leave_behind(folder, on_disk, say=say)
            with suppress(OSError):  # a disk in trouble: ranks that are started again then do the same once more
                folder.resumed.touch()
        if looks:
            snapshots.clear()
    checkpoints.share(model, optimizer, world, source=source)
    where = found.path if found and world.rank == source else f"the memory of rank {source}'s host"
    say(f"going on from {where} (step {state.step:,})")
    return state


def what_to_resume(given: str, folder: RunFolder, world: World, *, started_again: bool) -> str:
    """What the user said, or for ranks that are started again what they have made of it since."""
    if any(world.gather(started_again)):
        done = world.on_main(lambda: folder.resumed.exists() and bool(checkpoint_paths(folder.checkpoints)))
        return "auto" if done else given
    world.on_main(lambda: folder.resumed.unlink(missing_ok=True))
    return given


def find(resume_from: str, folder: RunFolder, *, say: Say) -> Checkpoint | None:
    """What `resume_from` means: auto (the newest valid checkpoint, if any), a step, a checkpoint, a run, or a .pt."""
    if resume_from == "auto":
        return newest_valid(folder.checkpoints, warn=say)
    check_resume(resume_from, folder)
    path = _named(resume_from, folder)
    if path.suffix == SINGLE_FILE:
        return open_single_file(path)
    if (path / MANIFEST).exists():
        return open_checkpoint(path)
    newest = newest_valid(RunFolder(path).checkpoints, warn=say)
    if newest is None:
        raise CheckpointError(f"the run {path} has no valid checkpoint", fix="start without --resume_from")
    return newest


def check_resume(resume_from: str, folder: RunFolder) -> None:
    """Refuse at once what cannot be resumed from; whether it is whole is found out when it is opened."""
    if resume_from == "auto":
        return
    path = _named(resume_from, folder)
    if path.suffix == SINGLE_FILE and path.is_file():
        return
    if not (path / MANIFEST).exists() and not checkpoint_paths(RunFolder(path).checkpoints):
        steps = ", ".join(str(step_of(p)) for p in checkpoint_paths(folder.checkpoints)) or "none"
        raise CheckpointError(
            f"--resume_from {resume_from} is neither a checkpoint nor a run with one (steps saved in {folder.path}: "
            f"{steps})",
            fix="give a step, RUN/checkpoints/step-NNNNNNNN, RUN, or a .pt that `drumline checkpoint export` wrote",
        )


def leave_behind(folder: RunFolder, found: Checkpoint, *, say: Say) -> None:
    """A run that goes on from what was found does not meet the checkpoints of the way it left."""
    for path in checkpoint_paths(folder.checkpoints):
        is_found = path.absolute() == found.path.absolute()
        if step_of(path) >= found.step and not is_found:
            say(f"{path.name} is of a way this run has left: {checkpoints.set_aside(path, 'superseded')}")


def _named(resume_from: str, folder: RunFolder) -> Path:
    return folder.checkpoint(int(resume_from)) if resume_from.isdigit() else Path(resume_from)


def _check_same_run(found: Checkpoint, facts: dict[str, Any], allow_change: Sequence[str]) -> None:
    changed = [
        f"{name} {found.state.facts.get(name)} -> {value}"
        for name, value in facts.items()
        if found.state.facts.get(name) != value and name not in allow_change
    ]
    if changed:
        raise CheckpointError(
            f"{found.path} is of a run with other settings ({'; '.join(changed)})",
            fix="give the same settings to go on with it, or start anew in another run_dir",
        )


def _step(found: Checkpoint | None) -> int:
    return found.step if found else -1
