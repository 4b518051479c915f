"""All runs of a folder, by name. Only what lies in that folder is a run, whatever a page asks for."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from drumline.errors import ConfigError
from drumline.files import RunFolder, run_folders, run_of
from drumline.watch.source import RunSource

_MOST_RUNS = 500


class Library:
    """A run folder, or a folder of runs, which may not exist yet."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self._run = run_of(where)
        self._sources: dict[str, RunSource] = {}
        self._lock = threading.Lock()
        if self._single is None and where.exists() and not where.is_dir():
            raise ConfigError(f"{where} is no folder", fix="give a run folder, or the folder that contains the runs")

    @property
    def _single(self) -> RunFolder | None:
        """The run that the folder is; a run that has just been started may become one."""
        return self._run if is_run(self._run) else None

    def names(self) -> list[str]:
        """The runs that are there now."""
        single = self._single
        if single is not None:
            return [single.path.resolve().name]
        inside = os.path.realpath(self.where)
        runs = [each.path for each in _runs_in(self.where) if Path(os.path.realpath(each.path)).is_relative_to(inside)]
        return [path.name for path in runs][-_MOST_RUNS:]

    def source(self, name: str) -> RunSource | None:
        """A run by its name; None if there is none of that name."""
        with self._lock:
            if name not in self._sources and name in self.names():
                single = self._single
                path = single.path if single else self.where / name
                self._sources[name] = RunSource(Path(os.path.realpath(path)), name)
            return self._sources.get(name)

    def runs(self) -> list[dict[str, Any]]:
        """One line per run, without reading its records."""
        rows = []
        for name in self.names():
            source = self.source(name)
            if source is not None:
                with source.lock:
                    source.read_status()
                    rows.append(source.summary())
        return rows


def is_run(folder: RunFolder) -> bool:
    """Whether a folder has anything of a run."""
    return any(path.is_file() for path in (folder.config, folder.trainer, folder.metrics, folder.status))


def _runs_in(where: Path) -> list[RunFolder]:
    return run_folders(where) if where.is_dir() else []


def one_run(path: Path) -> RunSource:
    """The run at a path, read to its end; ConfigError if there is none."""
    folder = run_of(path)
    if not is_run(folder):
        problem = "is no run folder" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {problem}", fix="give a run folder, as in drumline report runs/tiny")
    source = RunSource(Path(os.path.realpath(folder.path)), folder.path.resolve().name)
    source.refresh()
    return source
