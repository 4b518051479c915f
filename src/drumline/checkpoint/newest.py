"""The newest checkpoint of a run that verifies; damaged ones are set aside on the way to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from drumline.checkpoint.checkpoints import Checkpoint, OtherFormatError, checkpoint_paths, open_checkpoint
from drumline.checkpoint.retention import step_of
from drumline.errors import CheckpointError
from drumline.files import publish


def newest_valid(folder: Path, *, warn: Callable[[str], None], before: int | None = None) -> Checkpoint | None:
    """The newest checkpoint (before a step) that verifies; damaged ones are named and set aside on the way."""
    return next(valid_ones(folder, warn=warn, before=before), None)


def valid_ones(folder: Path, *, warn: Callable[[str], None], before: int | None = None) -> Iterator[Checkpoint]:
    for path in reversed(checkpoint_paths(folder)):
        if before is not None and step_of(path) >= before:
            continue
        try:
            yield open_checkpoint(path)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            warn(f"{error.problem}; {set_aside(path, 'damaged')}, trying the one before")
            publish({"event": "checkpoint damaged", "path": str(path)})


def set_aside(path: Path, why: str) -> str:
    """Rename a checkpoint so that it is not used again; says what was done."""
    aside = path.with_name(f"{path.name}.{why}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError as error:  # a read-only disk: it stays where it is, and is passed over again next time
        return f"it cannot be set aside ({error.strerror})"
    return f"set aside as {aside.name}"
