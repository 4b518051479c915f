"""The folder of a launcher for what it and its ranks exchange: in shared memory, or where there is room for it.

It belongs to the launcher that holds its lock. Process ids would not do: containers that share /dev/shm count their
processes each from 1. Only its user can look into it, and what another user has put in such a place is left alone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from drumline.files import Lock, is_own_folder
from drumline.parallel import Attempt, reserve_record

_MEMORY = Path("/dev/shm")
_LOCK = "lock"
_RANK_BYTES, _RANK_FILES = 256 << 10, 6
"""Room for a rank's heartbeat, stacks and exception, and for files that are being written."""
_CAUSE_BYTES = 32 << 10
"""Reserved for a rank's exception: shared memory may be full by then."""


class Scratch:
    """The folders of a launcher's attempts, one after another."""

    def __init__(self) -> None:
        self._locks: dict[Path, Lock] = {}
        self._attempt: Attempt | None = None

    def attempt(self, number: int, ranks: Sequence[int]) -> Attempt:
        """The folder of an attempt, with room for these ranks' heartbeats; that of the attempt before is removed.

        Where there is room nowhere it does not exist: its ranks run, but are not watched.
        """
        if self._attempt is not None:
            shutil.rmtree(self._attempt.folder, ignore_errors=True)
        for where in _places():
            with suppress(OSError):
                self._attempt = Attempt.numbered(self._folder_in(where), number)
                _make(self._attempt, ranks)
                return self._attempt
        return Attempt.numbered(Path(os.devnull), number)

    def remove(self) -> None:
        for path, lock in self._locks.items():
            shutil.rmtree(path, ignore_errors=True)
            lock.close()

    def _folder_in(self, where: Path) -> Path:
        """This launcher's folder there, made the first time; OSError if there is no room."""
        for path in self._locks:
            if path.parent == where:
                return path
        _remove_abandoned(where)
        path = Path(tempfile.mkdtemp(prefix=f"drumline-{os.getpid()}-", dir=where))  # for this user alone
        try:
            lock = Lock(path / f".{_LOCK}")
            lock.take()
            (path / f".{_LOCK}").rename(path / _LOCK)  # under its name, it is locked as long as the launcher lives
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        self._locks[path] = lock
        return path


def newest_attempt(launcher_pid: int) -> Attempt | None:
    """The current attempt of a launcher on this host, for external observers."""
    folders: list[Path] = []
    with suppress(FileNotFoundError):  # removed by a launcher that is exiting
        for where in _places():
            own = [path for path in where.glob(f"drumline-{launcher_pid}-*") if is_own_folder(path)]
            folders += [attempt for path in own for attempt in path.glob("attempt-*")]
    return max(map(Attempt, folders), key=lambda attempt: attempt.number, default=None)


def _places() -> list[Path]:
    return [path for path in dict.fromkeys((_MEMORY, Path(tempfile.gettempdir()))) if path.is_dir()]


def _make(attempt: Attempt, ranks: Sequence[int]) -> None:
    """Make its folder and the files of heartbeats and exceptions; OSError if there is no room."""
    attempt.folder.mkdir()
    try:
        for rank in ranks:
            reserve_record(attempt.pulse(rank))
            reserve_record(attempt.cause(rank), _CAUSE_BYTES)
        free = os.statvfs(attempt.folder)
        few_files = free.f_files and free.f_favail < _RANK_FILES * len(ranks)  # some file systems do not count them
        if few_files or free.f_bavail * free.f_frsize < _RANK_BYTES * len(ranks):
            raise OSError("no room for what ranks write when they fail")
    except OSError:
        shutil.rmtree(attempt.folder, ignore_errors=True)
        raise


def _remove_abandoned(where: Path) -> None:
    """Remove the folders of this user's launchers that are gone."""
    for path in where.glob("drumline-*-*"):
        with suppress(OSError):
            if not is_own_folder(path):
                continue
            lock = os.open(path / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
