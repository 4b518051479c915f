"""The newest valid checkpoint of a run; damaged ones on the way are renamed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from drumline.checkpoint.checkpoints import Checkpoint, OtherFormatError, checkpoint_paths, open_checkpoint
from drumline.checkpoint.retention import step_of
from drumline.errors import CheckpointError
from drumline.files import publish


def newest_valid(folder: Path, *, warn: Callable[[str], None], before: int | None = None) -> Checkpoint | None:
    """The newest valid checkpoint (before a step); damaged ones on the way are reported and renamed."""
    return next(valid_ones(folder, warn=warn, before=before), None)


def valid_ones(folder: Path, *, warn: Callable[[str], None], before: int | None = None) -> Iterator[Checkpoint]:
    """Valid checkpoints (before a step), newest first."""
    for path in reversed(checkpoint_paths(folder)):
        if before is not None and step_of(path) >= before:
            continue
        try:
            yield open_checkpoint(path)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            warn(f"{error.problem}; {set_aside(path, 'damaged')}, trying the previous one")
            publish({"event": "checkpoint damaged", "path": str(path)})


def set_aside(path: Path, why: str) -> str:
    """Rename a checkpoint so that it is not used again; returns what was done, as text."""
    aside = path.with_name(f"{path.name}.{why}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError as error:  # a read-only disk: it stays, and is skipped again next time
        return f"it cannot be renamed ({error.strerror})"
    return f"renamed to {aside.name}"
