"""What `drumline checkpoint` does with a run's checkpoints: list, verify, export and prune. Prints nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.checkpoint.checkpoints import Checkpoint, OtherFormatError, checkpoint_paths, open_checkpoint
from drumline.checkpoint.export import single_file_name, write_single_file
from drumline.checkpoint.in_memory import snapshots_of
from drumline.checkpoint.newest import DAMAGED, SUPERSEDED
from drumline.checkpoint.retention import Retention, leftovers, reasons, step_of, valid_loss
from drumline.config import read_settings
from drumline.errors import CheckpointError, ConfigError
from drumline.files import CHECKPOINT_PREFIX, RunFolder, refuse_links, refuse_pipes, stored_config

_HOLD_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One row of the list."""

    step: int
    saved: float
    """When, in seconds since 1970."""
    bytes: int
    valid_loss: float | None
    kept: str
    """Why it is kept, or why it is not used."""


def list_checkpoints(run: Path) -> list[Listed]:
    """All checkpoints of a run: on disk oldest first, renamed ones, and in this host's memory."""
    folder = _run_folder(run)
    paths = checkpoint_paths(folder.checkpoints)
    kept = reasons(paths, run_retention(folder))
    rows = [_listed(path, ", ".join(kept[path]) or "deleted at the next save") for path in paths if path.exists()]
    rows += [_listed(path, "not used: a link to nowhere") for path in paths if not path.exists()]
    rows += [_listed(path, f"not used: {path.suffix[1:]}") for path in _set_aside(folder)]
    rows += [
        Listed(step=each.step, saved=each.saved, bytes=each.bytes, valid_loss=None, kept="in memory")
        for each in snapshots_of(folder).complete()[:1]
    ]
    if not rows:
        raise _none_yet(folder)
    return rows


def verify_checkpoints(run: Path, *, step: int | None) -> Iterator[tuple[Path, str | None]]:
    """Each checkpoint (or the one of a step), newest first, with what is wrong with it; None: it is valid."""
    folder = _run_folder(run)
    for path in reversed(_chosen(folder, step)):
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            yield path, error.problem
        else:
            yield path, None


def set_aside_checkpoints(run: Path, *, step: int | None) -> list[tuple[Path, str]]:
    """Those that a run has renamed and does not use any more, newest first, with the reason."""
    whys = {DAMAGED: "set aside as damaged", SUPERSEDED: "set aside: the run went back before it"}
    paths = reversed(_set_aside(_run_folder(run)))
    return [(path, whys[path.suffix[1:]]) for path in paths if step in (None, _step(path))]


def export_checkpoint(
    run: Path, *, step: int | None, out: Path | None, force: bool
) -> tuple[Checkpoint, Path, list[str]]:
    """Write the newest valid checkpoint (or the one of a step) as a single file.

    Returns both, and what is wrong with newer ones. out: a file, or a folder that exists
    """
    folder = _run_folder(run)
    damaged: dict[Path, str] = {}
    if step is None:
        chosen, damaged = _newest_whole(folder)
    else:
        chosen = open_checkpoint(_chosen(folder, step)[0])
    if out is None:
        refuse_links(folder)
    file = out or folder.checkpoints
    file = file / single_file_name(chosen.step) if file.is_dir() else file
    if file.exists() and not force:
        raise ConfigError(f"{file} already exists", fix="add --force to overwrite it, or choose another --out")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_single_file(chosen, file, settings=_settings(folder), tokenizer=_tokenizer(folder))
    except (OSError, RuntimeError) as error:  # torch's writer turns one into the other
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{file} is not writable ({why})", fix="choose another file: --out FILE") from None
    return chosen, file, list(damaged.values())


def _settings(folder: RunFolder) -> dict[str, Any] | None:
    settings = read_settings(folder.config) if folder.config.exists() else {}
    return {name: value for name, value in settings.items() if name != "run_dir"} or None


def _tokenizer(folder: RunFolder) -> str | None:
    return folder.tokenizer.read_text(encoding="utf-8") if folder.tokenizer.exists() else None


@dataclass(frozen=True, kw_only=True)
class Pruned:
    gone: dict[Path, int]
    """What was, or would be, deleted, and its bytes."""
    damaged: tuple[str, ...]
    """What is wrong with each checkpoint that is newer than the newest valid one."""


def prune_checkpoints(
    run: Path, *, keep: int | None, keep_every: int | None, keep_best: bool | None, dry_run: bool
) -> Pruned:
    """Delete what the run's retention (or these settings) does not keep, and what no run will use again."""
    folder = _run_folder(run)
    own = run_retention(folder)
    for name, value in (("keep", keep), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", fix=f"give --{name} a value of 1 or more")
    retention = Retention(
        last=own.last if keep is None else keep,
        every=own.every if keep_every is None else keep_every,
        best=own.best if keep_best is None else keep_best,
    )
    with folder.hold(wait_s=_HOLD_WAIT_S):
        newest, damaged = _newest_whole(folder)
        usable = [path for path in checkpoint_paths(folder.checkpoints) if step_of(path) <= newest.step]
        doomed = [path for path, why in reasons(usable, retention).items() if not why]
        doomed += [*damaged, *_set_aside(folder), *leftovers(folder), *folder.checkpoints.glob(".seen-*")]
        gone = {path: _bytes(path) for path in doomed}
        if not dry_run:
            _delete(doomed)
    return Pruned(gone=gone, damaged=tuple(damaged.values()))


def run_retention(folder: RunFolder) -> Retention:
    """The run's own retention; the default without a config.toml."""
    config = stored_config(folder)
    if config is None:
        return Retention()
    return Retention(last=config.run.keep_checkpoints, every=config.run.keep_every, best=config.run.keep_best)


def _run_folder(run: Path) -> RunFolder:
    folder = RunFolder(run)
    if re.match(r"[a-z0-9]+:/", str(run)) and not run.exists():
        raise CheckpointError(
            f"{str(run).replace(':/', '://', 1)} is in a store, where checkpoints are only listed",
            fix="verify, export and prune work on the run folder; without one, fetch the run: "
            "drumline train --checkpoint_store URL --run_dir FOLDER",
        )
    if not folder.config.exists() and not folder.checkpoints.is_dir():
        raise CheckpointError(f"{run} is not a run", fix="give a run folder; `drumline runs` lists them")
    refuse_pipes(folder)
    return folder


def _chosen(folder: RunFolder, step: int | None) -> list[Path]:
    """Every checkpoint, oldest first, or the one of a step."""
    paths = checkpoint_paths(folder.checkpoints)
    if not paths:
        raise _none_yet(folder)
    if step is None:
        return paths
    if folder.checkpoint(step) not in paths:
        raise CheckpointError(
            f"{folder.path} has no checkpoint of step {step}",
            fix=f"choose one of --step {', '.join(str(step_of(path)) for path in paths)}",
        )
    return [folder.checkpoint(step)]


def _newest_whole(folder: RunFolder) -> tuple[Checkpoint, dict[Path, str]]:
    """The newest valid checkpoint, and what is wrong with those after it; nothing is renamed."""
    damaged: dict[Path, str] = {}
    for path in reversed(_chosen(folder, None)):
        try:
            return open_checkpoint(path), damaged
        except OtherFormatError:
            raise
        except CheckpointError as error:
            damaged[path] = error.problem
    which = "the only checkpoint" if len(damaged) == 1 else f"each of the {len(damaged)} checkpoints"
    raise CheckpointError(
        f"{which} of {folder.path} is damaged",
        fix="see what is wrong with each: drumline checkpoint verify " + str(folder.path),
        details=list(damaged.values()),
    )


def _none_yet(folder: RunFolder) -> CheckpointError:
    aside = [f"{path} was set aside" for path in _set_aside(folder)]
    fix = "train until its first save (--save_every)"
    return CheckpointError(f"the run {folder.path} has no checkpoints", fix=fix, details=aside)


def _set_aside(folder: RunFolder) -> list[Path]:
    return sorted(
        p for p in folder.checkpoints.glob(f"{CHECKPOINT_PREFIX}*.*") if p.suffix[1:] in (DAMAGED, SUPERSEDED)
    )


def _listed(path: Path, kept: str) -> Listed:
    return Listed(
        step=_step(path),
        saved=path.lstat().st_mtime,
        bytes=_bytes(path),
        valid_loss=valid_loss(path),
        kept=kept,
    )


def _step(path: Path) -> int:
    """Also of one that was renamed."""
    return int(path.name.removeprefix(CHECKPOINT_PREFIX).partition(".")[0])


def _bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in (path, *path.rglob("*")) if not file.is_dir())


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be deleted ({error.strerror})", fix="fix its permissions, or remount the disk writable"
            ) from None
