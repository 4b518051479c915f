"""Which checkpoints are kept: the last few, every so many steps, and the one with the lowest validation loss."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.checkpoint.checkpoints import RUN, Checkpoint, checkpoint_paths
from drumline.files import CHECKPOINT_PREFIX, RunFolder


@dataclass(frozen=True, kw_only=True)
class Retention:
    last: int = 3
    """Number of newest ones."""
    every: int | None = None
    """Also those at multiples of this many steps."""
    best: bool = True
    """Also the one with the lowest validation loss."""


def prune(folder: RunFolder, retention: Retention, *, newest: Checkpoint, spare: str) -> None:
    """Delete what need not be kept, and what killed savers left behind.

    newest: the newest checkpoint, just verified: whatever is deleted, the run can resume from it
    spare:  the calling saver: its other ranks may already be writing the next checkpoint
    """
    kept = reasons(checkpoint_paths(folder.checkpoints), retention)
    gone = [path for path, why in kept.items() if not why and path != newest.path]
    for path in (*gone, *(path for path in leftovers(folder) if spare not in path.name)):
        shutil.rmtree(path, ignore_errors=True)


def reasons(paths: Sequence[Path], retention: Retention) -> dict[Path, list[str]]:
    """Why each checkpoint (oldest first) is kept: newest, last N, every, best; empty if it need not be."""
    judged = {path: loss for path in paths if (loss := valid_loss(path)) is not None}
    best = min(judged, key=lambda path: judged[path], default=None)
    newest = set(paths[-retention.last :])
    return {
        path: [
            *(["newest" if path == paths[-1] else f"last {retention.last}"] if path in newest else []),
            *(["every"] if retention.every is not None and step_of(path) % retention.every == 0 else []),
            *(["best"] if retention.best and path == best else []),
        ]
        for path in paths
    }


def leftovers(folder: RunFolder) -> list[Path]:
    """Incomplete folders of savers that were killed."""
    return sorted(folder.checkpoints.glob(f".{CHECKPOINT_PREFIX}*.partial-*"))


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(CHECKPOINT_PREFIX))


def valid_loss(path: Path) -> float | None:
    """The validation loss of a checkpoint, if it has one."""
    try:
        loss = json.loads((path / RUN).read_text(encoding="utf-8"))["valid_loss"]
        return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
