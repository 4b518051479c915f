"""Whether a run resumes from something; restoring.py does it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.checkpoint.checkpoints import checkpoint_paths
from drumline.files import RunFolder
from drumline.parallel import World

if TYPE_CHECKING:
    from drumline.snapshots import Snapshots

MEMORY = Path("/dev/shm")


def has_begun(resume_from: str, folder: RunFolder, world: World, snapshots: Snapshots | None) -> bool:
    """Whether there may be something to resume from, on any rank's host."""
    here = resume_from != "auto" or snapshots is not None or bool(checkpoint_paths(folder.checkpoints))
    return any(world.gather(here))


def what_to_resume(given: str, folder: RunFolder, world: World, *, started_again: bool) -> str:
    """The user's setting or, for restarted ranks, auto once it was followed."""
    if any(world.gather(started_again)):
        done = world.on_rank0(lambda: folder.resumed.exists() and bool(checkpoint_paths(folder.checkpoints)))
        return "auto" if done else given
    world.on_rank0(lambda: folder.resumed.unlink(missing_ok=True))
    return given


def check_resume(resume_from: str, folder: RunFolder) -> None:
    """Refuse immediately what cannot be resumed from."""
    if resume_from != "auto":
        from drumline.checkpoint.newest import check_named

        check_named(resume_from, folder)


def find_snapshots(run: RunFolder, world: World, *, takes: bool, copies: int = 1) -> Snapshots | None:
    """The snapshots of a run on this host; None if none are taken and none were left. copies: hosts with each shard"""
    run_id = world.on_rank0(run.run_id)
    if not takes and not snapshot_folder(run_id).exists():
        return None
    from drumline.checkpoint.in_memory import opened_snapshots

    return opened_snapshots(run, run_id, world, copies)


def snapshot_folder(run_id: str) -> Path:
    """Where a run's snapshots are on this host. run_id: of `RunFolder.run_id`, which is never a path"""
    assert run_id.isalnum(), run_id
    return MEMORY / f"drumline-{os.getuid()}" / run_id
