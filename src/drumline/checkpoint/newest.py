"""The newest valid checkpoint of a run, or the one that is asked for; damaged ones on the way are renamed, unless it is
only read."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from drumline.checkpoint.checkpoints import (
    _FILE_NAME,
    MANIFEST,
    RUN,
    Checkpoint,
    OtherFormatError,
    checkpoint_paths,
    open_checkpoint,
)
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.storage import SUFFIX
from drumline.errors import CheckpointError, DrumlineError
from drumline.files import CHECKPOINT_PREFIX, RunFolder, publish
from drumline.parallel import World

SINGLE_FILE = ".pt"
"""The suffix of exported checkpoints."""
SINGLE_FILES = (SINGLE_FILE, ".pth")
"""Suffixes of files that scripts save with torch.save."""
T = TypeVar("T")
Open = Callable[[Path], Checkpoint]
DAMAGED, SUPERSEDED = "damaged", "superseded"
"""Why a checkpoint was renamed, which is then the end of its name."""


def newest_valid(
    folder: Path, *, warn: Callable[[str], None], before: int | None = None, opened: Open = open_checkpoint
) -> Checkpoint | None:
    """The newest valid checkpoint (before a step); damaged ones on the way are reported and renamed."""
    return next(valid_ones(folder, warn=warn, before=before, opened=opened), None)


def valid_ones(
    folder: Path, *, warn: Callable[[str], None], before: int | None = None, opened: Open = open_checkpoint
) -> Iterator[Checkpoint]:
    """Valid checkpoints (before a step), newest first. opened: verifies one"""
    paths = [path for path in checkpoint_paths(folder) if before is None or step_of(path) < before]
    for path in reversed(paths):
        try:
            yield opened(path)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            next_one = "" if path == paths[0] else ", trying the previous one"
            warn(f"{error.problem}; {set_aside(path, DAMAGED)}{next_one}")
            publish({"event": "checkpoint damaged", "path": str(path)})


def verified_together(work: Callable[[Open], T], world: World) -> T | None:
    """On rank 0, the result of `work`; every rank that sees a checkpoint that it opens verifies some of its files.

    All ranks call it. So what is read of a large one is divided, and all of them use the same one.
    """
    if not world.is_rank0:
        while (asked := world.gather(None)[0]) is not None:
            path, same = Path(asked[0]), asked[1]
            sees = manifest_sha256(path) == same
            seeing = [rank for rank, each in enumerate(world.gather(sees)) if each]
            world.gather(_damage(path, _share(path, seeing.index(world.rank), len(seeing))) if sees else None)
        return _done(None, world)

    def opened(path: Path) -> Checkpoint:
        checkpoint = open_checkpoint(path, read=(RUN,))
        world.gather([str(path.absolute()), manifest_sha256(path)])
        parts = sum(world.gather(True))
        problems = [problem for problem in world.gather(_damage(path, _share(path, 0, parts))) if problem]
        if problems:
            raise CheckpointError(problems[0], fix="resume from another checkpoint of the run")
        return checkpoint

    try:
        result = work(opened)
    except DrumlineError as error:
        return _done(error, world)
    return _done(result, world)


def _done(outcome: T | DrumlineError, world: World) -> T | None:
    """Let the others go, which get None or the error of rank 0."""
    if world.is_rank0:
        world.gather(None)

    def result() -> T | None:
        if isinstance(outcome, DrumlineError):
            raise outcome
        return outcome

    return world.on_all_ranks(result)


def manifest_sha256(path: Path) -> str | None:
    """Of a checkpoint's manifest.json, as it is on this host; None: it is not there."""
    try:
        return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None


def _share(path: Path, part: int, parts: int) -> list[str]:
    """Some of the files of a checkpoint; those of about the same size in turn."""
    sizes = {each.name: each.stat().st_size for each in path.glob(f"*{SUFFIX}")}
    return sorted(sizes, key=lambda name: (-sizes[name], name))[part::parts]


def _damage(path: Path, names: list[str]) -> str | None:
    """What is wrong with these files of a checkpoint, of which the rest is not read."""
    try:
        open_checkpoint(path, read=(RUN, *names))
    except CheckpointError as error:
        return error.problem
    except OSError as error:
        return f"the checkpoint {path} is damaged: it cannot be read ({error})"
    return None


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


def is_damage(error: CheckpointError) -> bool:
    """Whether a checkpoint that could not be opened is of no use to any version of drumline."""
    return not isinstance(error, OtherFormatError)


def is_part(name: str) -> bool:
    """Whether a file of this name may be in a checkpoint, besides its manifest; none of them is outside its folder."""
    return _FILE_NAME.fullmatch(name) is not None


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


def leave_behind(folder: RunFolder, start: Checkpoint, *, say: Callable[[str], None]) -> None:
    """Rename checkpoints that are newer than `start`, which the run no longer continues from."""
    for path in checkpoint_paths(folder.checkpoints):
        is_start = path.absolute() == start.path.absolute()
        if step_of(path) >= start.step and not is_start:
            say(f"{path.name} is newer than the step resumed from: {set_aside(path, SUPERSEDED)}")


def find(
    resume_from: str, folder: RunFolder, *, say: Callable[[str], None], opened: Open = open_checkpoint
) -> Checkpoint | None:
    """What `resume_from` refers to: auto (the newest valid checkpoint), a step, a checkpoint, a run or a .pt."""
    if resume_from == "auto":
        return newest_valid(folder.checkpoints, warn=say, opened=opened)
    check_named(resume_from, folder)
    path = _named(resume_from, folder)
    if path.suffix in SINGLE_FILES:
        from drumline.checkpoint.export import open_single_file

        return open_single_file(path)
    if (path / MANIFEST).exists():
        return opened(path)
    newest = newest_valid(RunFolder(path).checkpoints, warn=say, opened=opened)
    if newest is None:
        raise CheckpointError(f"the run {path} has no valid checkpoint", fix="start without --resume_from")
    return newest


def check_named(resume_from: str, folder: RunFolder) -> None:
    """Refuse immediately what cannot be resumed from; whether it is valid is checked when it is opened."""
    path = _named(resume_from, folder)
    if path.suffix in SINGLE_FILES and path.is_file():
        return
    if not (path / MANIFEST).exists() and not checkpoint_paths(RunFolder(path).checkpoints):
        steps = ", ".join(str(step_of(p)) for p in checkpoint_paths(folder.checkpoints)) or "none"
        raise CheckpointError(
            f"--resume_from {resume_from} is neither a checkpoint nor a run with one (steps saved in {folder.path}: "
            f"{steps})",
            fix="use a step, RUN/checkpoints/step-NNNNNNNN, RUN, or a .pt file from `drumline checkpoint export`",
        )


def _named(resume_from: str, folder: RunFolder) -> Path:
    return folder.checkpoint(int(resume_from)) if resume_from.isdigit() else Path(resume_from)
