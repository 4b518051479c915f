"""The newest valid checkpoint of a run; damaged ones on the way are renamed, unless it is only read."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from drumline.checkpoint.checkpoints import Checkpoint, OtherFormatError, checkpoint_paths, open_checkpoint
from drumline.checkpoint.retention import step_of
from drumline.errors import CheckpointError
from drumline.files import CHECKPOINT_PREFIX, publish

DAMAGED, SUPERSEDED = "damaged", "superseded"
"""Why a checkpoint was renamed, which is then the end of its name."""


def newest_valid(folder: Path, *, warn: Callable[[str], None], before: int | None = None) -> Checkpoint | None:
    """The newest valid checkpoint (before a step); damaged ones on the way are reported and renamed."""
    return next(valid_ones(folder, warn=warn, before=before), None)


def valid_ones(folder: Path, *, warn: Callable[[str], None], before: int | None = None) -> Iterator[Checkpoint]:
    """Valid checkpoints (before a step), newest first."""
    paths = [path for path in checkpoint_paths(folder) if before is None or step_of(path) < before]
    for path in reversed(paths):
        try:
            yield open_checkpoint(path)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            next_one = "" if path == paths[0] else ", trying the previous one"
            warn(f"{error.problem}; {set_aside(path, DAMAGED)}{next_one}")
            publish({"event": "checkpoint damaged", "path": str(path)})


def newest_readable(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint, and what is wrong with those that are newer; changes nothing."""
    damaged: list[str] = []
    for path in sorted(folder.glob(f"{CHECKPOINT_PREFIX}*"), key=_number, reverse=True):
        number, _, why = path.name.removeprefix(CHECKPOINT_PREFIX).partition(".")
        if not number.isdecimal() or why not in ("", DAMAGED):
            continue
        try:
            if why:
                raise CheckpointError(f"the checkpoint {path} was set aside as damaged", fix="")
            return open_checkpoint(path), damaged
        except OtherFormatError:
            raise
        except CheckpointError as error:
            damaged.append(error.problem)
    return None, damaged


def _number(path: Path) -> tuple[int, str]:
    number = path.name.removeprefix(CHECKPOINT_PREFIX).partition(".")[0]
    return int(number) if number.isdecimal() else -1, path.name


def set_aside(path: Path, why: str) -> str:
    """Rename a checkpoint so that it is not used again; returns what was done, as text."""
    aside = path.with_name(f"{path.name}.{why}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    except OSError as error:  # a read-only disk: it stays, and is skipped again next time
        return f"it cannot be renamed ({error.strerror})"
    return f"renamed to {aside.name}"
