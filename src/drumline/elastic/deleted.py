"""A run folder that is deleted while ranks are restarted: it keeps its name, by which its snapshots are found."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from drumline.errors import ConfigError
from drumline.files import RunFolder, replace_text


class FolderOfRun:
    """The folder that the ranks of the first attempt trained in, as this host sees it."""

    def __init__(self) -> None:
        self._folder: RunFolder | None = None
        self._run_id = ""

    def look(self, path: Path | None) -> None:
        """Remember whose folder it is, once rank 0 has chosen it and it has a name."""
        if path is not None and not self._run_id:
            self._folder = RunFolder(path)
            self._run_id = self._folder.stored_id()

    def put_back(self) -> bool:
        """Whether the folder was gone; it is made again, with its name. ConfigError if another run is there by now."""
        if self._folder is None or not self._run_id:
            return False
        there = self._folder.stored_id()
        if there not in ("", self._run_id):
            raise ConfigError(
                f"the run folder {self._folder.path} was deleted while the run was training, and another run is there",
                fix="run the same command again with another --run_dir to begin anew",
            )
        if there:
            return False
        with suppress(OSError):  # a disk that fails is no deleted folder: ranks say what is wrong with it
            self._folder.path.mkdir(parents=True, exist_ok=True)
            replace_text(self._folder.identity, self._run_id)
        return True

    @property
    def deleted(self) -> str:
        assert self._folder is not None
        return (
            f"the run folder {self._folder.path} was deleted while the run was training; it is made again: "
            "the run goes on from a snapshot, if one is in memory, without its earlier checkpoints and metrics"
        )
