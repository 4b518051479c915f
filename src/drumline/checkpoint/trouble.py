"""A save that fails: how it is reported, and the last resort of a run that must stop while its disk fails."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from drumline.checkpoint.checkpoints import RunState, checkpoint_paths, commit
from drumline.checkpoint.in_memory import snapshots_of
from drumline.checkpoint.resuming import MEMORY
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.storage import write_tensors
from drumline.errors import CheckpointError, DrumlineError
from drumline.files import RunFolder, replace_text
from drumline.parallel import World, waiting_for
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


def is_deleted(folder: RunFolder) -> bool:
    """Whether the run folder was removed, even if another run is there now. A disk that is gone may come back."""
    try:
        if folder.held is None or os.fstat(folder.held.descriptor).st_nlink > 0:
            return False
    except OSError:
        return False
    return folder.stored_id() != folder.run_id()


def slow_save(began: tuple[int, float], due: tuple[int, float], *, written_s: float) -> str:
    """The message about saves that take longer than the time between two of them.

    began, due: the step of this save and of the next one, and when they were due
    """
    steps, interval_s = due[0] - began[0], due[1] - began[1]
    fits = math.ceil(written_s / max(interval_s, 1e-9) * steps)
    return (
        f"warning: a checkpoint takes {written_s:.2g} s to write, longer than --save_every ({steps} steps, "
        f"{interval_s:.2g} s): the next one is saved when the disk is free; use --save_every {fits}"
    )


def end_unsaved(folder: RunFolder, world: World, tensors: dict[str, Tensor], state: RunState) -> NoReturn:
    """End a run that was asked to stop and whose disk fails, or whose folder was deleted; all ranks call this."""

    def on_rank0() -> list[str]:
        if is_deleted(folder):
            error = deleted(folder, state.step, rescued=rescue(folder, tensors, state))
        else:
            error = unsaved(folder, state.step, in_memory=keep_in_memory(folder, tensors, state))
        return [error.problem, error.fix]

    with waiting_for("the last checkpoint to be written"):
        problem, fix = world.on_rank0(on_rank0)
    raise CheckpointError(problem, fix=fix, reported=not world.is_rank0)


def rescue(folder: RunFolder, tensors: dict[str, Tensor], state: RunState) -> Path | None:
    """Save the state where the deleted run folder was, or beside, if another run is there now; None: that failed."""
    beside = (folder.path.with_name(f"{folder.path.name}-{number}") for number in itertools.count(2))
    place = next(path for path in beside if not path.exists()) if folder.stored_id() else folder.path
    new = RunFolder(place)
    aside = new.checkpoints / f".{RunFolder.checkpoint_name(state.step)}.{os.getpid()}"
    try:
        aside.mkdir(parents=True)
        replace_text(new.identity, folder.run_id())
        whole = {name: tensor.cpu() for name, tensor in tensors.items()}
        files = write_tensors(whole, aside, part=0, parts=1, reached=lambda point: None)
        commit(aside, new.checkpoint(state.step), state, files, about={})
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        return None
    folder.status = new.status
    return place


def deleted(folder: RunFolder, step: int, *, rescued: Path | None) -> CheckpointError:
    """The error of a run whose folder was deleted."""
    what = f"the run folder {folder.path} was deleted while the run was training; "
    if rescued is None:
        return CheckpointError(what + f"step {step:,} could not be saved there", fix="start the run again")
    return CheckpointError(
        what + f"step {step:,} is saved in {rescued}",
        fix=f"run the same command again with --run_dir {shlex.quote(str(rescued))} to resume",
    )


def keep_in_memory(folder: RunFolder, tensors: dict[str, Tensor], state: RunState) -> bool:
    """Whether the state is in this host's memory, to resume from before the host reboots."""
    try:
        snapshots_of(folder).store(tensors, state.step, asdict(state), token="unsaved")
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
