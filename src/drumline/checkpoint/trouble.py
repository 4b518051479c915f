"""A save that fails: how it is reported, and the last resort of a run that must stop while its disk fails."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from drumline.checkpoint.checkpoints import RunState, checkpoint_paths
from drumline.checkpoint.resuming import MEMORY
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.snapshots import Snapshots
from drumline.errors import CheckpointError, DrumlineError
from drumline.files import RunFolder
from drumline.parallel import World
from drumline.units import count


def explain(error: BaseException) -> str:
    if isinstance(error, DrumlineError):
        return error.problem
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {error}"


def failed_save(
    folder: RunFolder, *, step: int, why: str, needed_bytes: int, pause_s: float
) -> tuple[str, dict[str, Any]]:
    """The message and the event of a failed save."""
    return (
        f"WARNING: the checkpoint of step {step:,} could not be saved to {folder.checkpoints}: {why} "
        f"({count(needed_bytes)}B needed, {_free(folder.checkpoints)} free). The one of step {_newest_step(folder)} is "
        f"kept, training continues, and the save is retried in {pause_s:.0f} s",
        {"event": "save failed", "step": step, "why": why, "bytes": needed_bytes},
    )


def end_unsaved(folder: RunFolder, world: World, tensors: dict[str, Tensor], state: RunState) -> NoReturn:
    """End a run that was asked to stop and whose disk fails; all ranks call this."""
    in_memory = world.on_rank0(lambda: keep_in_memory(folder, tensors, state))
    error = unsaved(folder, state.step, in_memory=in_memory)
    error.reported = not world.is_rank0
    raise error


def keep_in_memory(folder: RunFolder, tensors: dict[str, Tensor], state: RunState) -> bool:
    """Whether the state is in this host's memory, to resume from before the host reboots."""
    snapshots = Snapshots.of(folder)
    if snapshots.no_room(sum(tensor.nbytes for tensor in tensors.values())) is not None:
        return False
    try:
        snapshots.save({name: tensor.cpu() for name, tensor in tensors.items()}, state)
    except OSError:
        return False
    return True


def unsaved(folder: RunFolder, step: int, *, in_memory: bool) -> CheckpointError:
    """The error of a run that had to stop without its last save."""
    kept = f"its state is kept in {MEMORY} until this host reboots" if in_memory else "it is lost"
    return CheckpointError(
        f"step {step} could not be saved to {folder.checkpoints} before the run had to stop: {kept}; the newest "
        f"checkpoint is of step {_newest_step(folder)}",
        fix="free up space there and run the same command again",
    )


def _newest_step(folder: RunFolder) -> str:
    paths = checkpoint_paths(folder.checkpoints)
    return f"{step_of(paths[-1]):,}" if paths else "none"


def _free(path: Path) -> str:
    try:
        return f"{count(shutil.disk_usage(path).free)}B"
    except OSError:
        return "none"
