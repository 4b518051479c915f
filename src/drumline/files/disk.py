"""Atomic files: flushed to disk, replaced in one step, identified by hash; files that grow by lines on a disk that may
be full or unreachable for a while; and a lock that dies with its process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

_LOCK_RETRY_S = 0.05


def flush(path: Path) -> None:
    """Make a file, or a folder's directory entries, durable: they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically, even across a power failure."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)  # it may be a link to somewhere, in a folder that came from elsewhere
        aside.write_text(text, encoding="utf-8")
        flush(aside)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class LineFile:
    """Appends whole lines to a file, even if the disk fails for a while.

    The file is opened for every write: it may be replaced, or its disk may disappear and come back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._whole_bytes: int | None = None  # size of the file before a write that failed

    def append(self, line: str) -> None:
        """All of the line or nothing; close can fail too, if a network disk reports late that it is full."""
        try:
            with self.path.open("ab", buffering=0) as file:
                self._cut(file.fileno())
                self._whole_bytes = os.fstat(file.fileno()).st_size
                rest = memoryview(line.encode("utf-8", errors="replace") + b"\n")
                while rest:  # a disk that is almost full writes the beginning, and only then fails
                    rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError), self.path.open("r+b", buffering=0) as file:
                self._cut(file.fileno())
            raise
        self._whole_bytes = None

    def _cut(self, descriptor: int) -> None:
        """Remove what a failed write left."""
        if self._whole_bytes is not None and os.fstat(descriptor).st_size > self._whole_bytes:
            os.ftruncate(descriptor, self._whole_bytes)


class Lock:
    """A lock file. The kernel releases the lock when the process exits, however it exits.

    Not `filelock`, which fails on a read-only disk and on file systems without locks, or leaves a lock file behind when
    killed, and whose older versions erase what the holder wrote to the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:
            if not path.exists():
                raise
            # Works on a file system that has become read-only.
            self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        # A forked child shares the lock, and would keep it after its parent's death.
        os.register_at_fork(after_in_child=self.close)

    def take(self, *, wait_s: float = 0.0) -> bool:
        """Whether this process got the lock within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_LOCK_RETRY_S)
            except OSError:  # ENOLCK, ENOTSUP, ENOSYS: some network file systems have no locks
                return True
            else:
                return True

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
