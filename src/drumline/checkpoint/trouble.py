"""A save that fails: how it is reported, and the last resort of a run that must stop while its disk fails."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from drumline.checkpoint.checkpoints import RunState, checkpoint_paths, commit
from drumline.checkpoint.resuming import MEMORY, snapshot_folder
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.storage import write_tensors
from drumline.errors import CheckpointError, DrumlineError
from drumline.files import RunFolder, replace_text
from drumline.parallel import World, waiting_for
from drumline.pieces import in_pieces, is_spread, own_pieces
from drumline.snapshots import Snapshots, ranks_by_host
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


def slow_save(began: tuple[int, float], due: tuple[int, float], *, taken_s: float) -> str:
    """The message about saves that take longer than the time between two of them.

    began, due: the step of this save and of the next one, and when they were due
    """
    steps, interval_s = due[0] - began[0], due[1] - began[1]
    fits = math.ceil(taken_s / max(interval_s, 1e-9) * steps)
    return (
        f"warning: a checkpoint takes {taken_s:.2g} s to write and check, longer than --save_every ({steps} steps, "
        f"{interval_s:.2g} s): the next one is saved when the disk is free; use --save_every {fits}"
    )


def end_unsaved(folder: RunFolder, world: World, tensors: dict[str, Tensor], state: RunState) -> NoReturn:
    """End a run that was asked to stop and whose disk fails, or whose folder was deleted; all ranks call this."""
    with waiting_for("the last checkpoint to be written"):
        # Of a state that is spread over ranks each has to keep some; else rank 0 has all of it.
        own, keepers = in_pieces(tensors, world.rank), [0]
        if is_spread(tensors.values()):
            keepers = list(range(world.size))
        own = {name: own[name] for name in own_pieces(tensors, world.rank, keepers)}
        if world.on_rank0(lambda: is_deleted(folder)):
            rescued = rescue(folder, world, own, keepers, state)
            problem, fix = world.on_rank0(lambda: _both(deleted(folder, state.step, rescued=rescued)))
        else:
            in_memory = keep_in_memory(folder, world, own, keepers, state)
            problem, fix = world.on_rank0(lambda: _both(unsaved(folder, state.step, in_memory=in_memory)))
    raise CheckpointError(problem, fix=fix, reported=not world.is_rank0)


def _both(error: CheckpointError) -> list[str]:
    return [error.problem, error.fix]


def rescue(folder: RunFolder, world: World, own: dict[str, Tensor], keepers: list[int], state: RunState) -> Path | None:
    """Save the state where the deleted run folder was, or beside, if another run is there now; None: that failed.

    own: what this rank writes of it; keepers: the ranks that write some
    """
    number = world.on_rank0(os.getpid)
    place = Path(world.on_rank0(lambda: str(_place_beside(folder))))
    new = RunFolder(place)
    aside = new.checkpoints / f".{RunFolder.checkpoint_name(state.step)}.{number}"

    def written(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError:
            return None

    def begin() -> bool:
        aside.mkdir(parents=True)
        replace_text(new.identity, folder.run_id())
        return True

    def write() -> Any:
        part = keepers.index(world.rank)
        whole = {name: tensor.cpu() for name, tensor in own.items()}
        return write_tensors(whole, aside, part=part, parts=len(keepers), reached=lambda point: None)

    begun = world.on_rank0(lambda: written(begin))
    every = world.gather(written(write) if begun and world.rank in keepers else {})

    def complete() -> bool:
        files = {name: facts for each in every for name, facts in each.items()}
        commit(aside, new.checkpoint(state.step), state, files, about={})
        return True

    if not begun or None in every or not world.on_rank0(lambda: written(complete)):
        world.on_rank0(lambda: shutil.rmtree(aside, ignore_errors=True))
        return None
    folder.status = new.status
    return place


def _place_beside(folder: RunFolder) -> Path:
    beside = (folder.path.with_name(f"{folder.path.name}-{number}") for number in itertools.count(2))
    return next(path for path in beside if not path.exists()) if folder.stored_id() else folder.path


def deleted(folder: RunFolder, step: int, *, rescued: Path | None) -> CheckpointError:
    """The error of a run whose folder was deleted."""
    what = f"the run folder {folder.path} was deleted while the run was training; "
    if rescued is None:
        return CheckpointError(what + f"step {step:,} could not be saved there", fix="start the run again")
    return CheckpointError(
        what + f"step {step:,} is saved in {rescued}",
        fix=f"run the same command again with --run_dir {shlex.quote(str(rescued))} to resume",
    )


def keep_in_memory(
    folder: RunFolder, world: World, own: dict[str, Tensor], keepers: list[int], state: RunState
) -> bool:
    """Whether the state is in the memory of its hosts, to resume from before they reboot."""
    hosts = ranks_by_host(snapshot_folder("any").parents[1], world)
    same = [rank for rank in next(ranks for ranks in hosts if world.rank in ranks) if rank in keepers]
    run_id, kept = world.on_rank0(folder.run_id), True
    if world.rank in keepers:
        place = same.index(world.rank), len(same)
        try:
            Snapshots(snapshot_folder(run_id), folder.path).store(
                own, state.step, asdict(state), token="unsaved", place=place
            )
        except OSError:
            kept = False
    return all(world.gather(kept))


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
