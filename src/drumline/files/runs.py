"""Run folders: which one a new run takes, the stored config of a run, and its state."""

from __future__ import annotations

import glob
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

import psutil

from drumline.config import TrainConfig, differences, from_settings, is_mix, read_settings, with_paths
from drumline.errors import ConfigError
from drumline.files.private import refuse_pipes
from drumline.files.run_folder import RunFolder

RUNS_DIR = Path("runs")


def run_folders(where: Path) -> list[RunFolder]:
    """The runs below a folder, by name; tiny-2 comes before tiny-10."""
    folders = [RunFolder(path) for path in sorted(where.glob("*"), key=_natural)]
    return [folder for folder in folders if _is_run(folder)]


def _is_run(folder: RunFolder) -> bool:
    try:
        refuse_pipes(folder)
    except ConfigError:  # of a stranger; whoever names it is told
        return False
    return folder.config.exists() or folder.trainer.exists()


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def existing_or_free(config: TrainConfig) -> RunFolder:
    """The existing folder that was asked for, or one that nobody uses."""
    if config.run.run_dir is None:
        return free_folder(config)
    return own_folder(Path(config.run.run_dir), config.data.data_dir)


def free_folder(config: TrainConfig) -> RunFolder:
    """The first of runs/PRESET, runs/PRESET-2, ... that does not exist, or is an unfinished run with this config."""
    return numbered_folder(config.model.preset, lambda folder: is_unfinished(folder) and _same(folder, config))


def numbered_folder(name: str, goes_on: Callable[[RunFolder], bool]) -> RunFolder:
    """The first of runs/NAME, runs/NAME-2, ... that does not exist, or has a run that `goes_on`."""
    folders = numbered_folders(name)
    return next(folder for folder in folders if not folder.path.exists() or goes_on(folder))


def numbered_folders(name: str) -> Iterator[RunFolder]:
    """runs/NAME, runs/NAME-2, ... without end, whether they exist or not."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return (RunFolder(RUNS_DIR / each) for each in names)


def own_folder(path: Path, data_dir: str) -> RunFolder:
    """A folder that exists, for a run; refused if it has files of others, and no run. data_dir: where tokens go"""
    folder = RunFolder(path)
    if any(part.exists() for part in (folder.config, folder.trainer, folder.checkpoints)) or not path.is_dir():
        return folder  # what is no folder is not writable, and called that
    # A run that could not start leaves some of its files.
    of_runs = {part.name for part in vars(folder).values() if isinstance(part, Path)} | {"wandb"}
    of_runs.add(os.path.relpath(data_dir, path).split(os.sep)[0])
    others = sorted(part.name for part in path.iterdir() if part.name[0] != "." and part.name not in of_runs)
    if others:
        what = f"{len(others):,} other files or folders, such as" if len(others) > 1 else "another file or folder,"
        raise ConfigError(
            f"{path} is no run, and has {what} {others[0]}",
            fix=f"choose a --run_dir that is empty or does not exist, as in --run_dir {quote(str(path / 'run'))}",
        )
    return folder


def is_unfinished(folder: RunFolder) -> bool:
    """Whether a run has ended before its end."""
    return run_state(folder) in ("stopped", "lost", "failed")


def _same(folder: RunFolder, config: TrainConfig) -> bool:
    stored = stored_config(folder)
    return (
        stored is not None
        and stored.data.train_data_path == config.data.train_data_path
        and not differences(stored, config)
    )


def stored_config(folder: RunFolder) -> TrainConfig | None:
    return from_settings(stored_settings(folder)) if folder.config.exists() else None


def stored_settings(folder: RunFolder) -> dict[str, Any]:
    """The settings in a run's config.toml; its relative paths are of the folder where the run was started."""
    refuse_pipes(folder)
    settings = read_settings(folder.config)
    cwd = origin(folder).get("cwd")
    if isinstance(cwd, str) and os.path.isabs(cwd) and cwd != os.getcwd() and os.path.isdir(cwd):
        for name in ("train_data_path", "valid_data_path", "tokenizer", "data_dir", "skip_list"):
            if is_mix(str(settings.get(name))):
                settings[name] = with_paths(settings[name], partial(_from, cwd))
                continue
            path = os.path.join(cwd, str(settings.get(name)))
            if name in settings and (
                os.path.exists(path) or (glob.has_magic(path) and glob.glob(path, recursive=True))
            ):
                settings[name] = path
        # Models, sources and loggers of the user's own; a run that came from elsewhere cannot choose what is imported.
        if cwd not in sys.path and Path(cwd) in folder.path.absolute().parents:
            sys.path.append(cwd)
    return settings


def _from(cwd: str, path: str) -> str:
    """A path as seen from a folder, if it is there."""
    return seen if os.path.exists(seen := os.path.join(cwd, path)) else path


def origin(folder: RunFolder) -> dict[str, Any]:
    """data.json; {} if there is none, as in runs of earlier versions."""
    try:
        stored = json.loads(folder.data.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


def read_status(folder: RunFolder) -> dict[str, Any]:
    try:
        status = dict(json.loads(folder.status.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
    return {k: v for k, v in status.items() if k not in ("step", "total_steps", "pid") or isinstance(v, int)}


def run_state(folder: RunFolder) -> str:
    """finished, stopped, failed or running; lost if it says running but its process is gone from this host.

    A supervisor that is restarting ranks counts as running.
    """
    status = folder.read_status()
    state = str(status.get("state", "new"))
    runs_here = state in ("running", "restarting") and status.get("host") == socket.gethostname()
    return "lost" if runs_here and not psutil.pid_exists(int(status.get("pid", 0))) else state


def run_of(path: Path) -> RunFolder:
    """The run of a path: a run folder, or the run of a checkpoint."""
    run = RunFolder(path)
    is_checkpoint = path.parent.name == run.checkpoints.name and not run.config.exists()
    run = RunFolder(path.parent.parent) if is_checkpoint else run
    refuse_pipes(run)
    return run


def not_writable(folder: RunFolder, error: OSError) -> ConfigError:
    return ConfigError(
        f"{folder.path} is not writable ({error.strerror or error})",
        fix="free up space or fix its permissions, or choose another --run_dir",
    )


def in_use(folder: RunFolder) -> ConfigError:
    return ConfigError(
        f"{folder.path} is in use: {_holder(folder)} is training there",
        fix="wait until it ends, stop it, or choose another --run_dir",
    )


def _holder(folder: RunFolder) -> str:
    """The process that trains in a folder."""
    try:
        process = json.loads(folder.lock.read_text(encoding="utf-8"))
        return f"process {process['pid']} on {process['host']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
