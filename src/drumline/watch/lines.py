"""Files that grow by lines: each line is read once, whatever happens to the file in between.

A run that restarts cuts its records and writes on. Then the file is read again from the last place up to which it is
what it was. Half a line waits for its end. Nothing outside of a folder is opened, not through links either.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 20
_LONGEST_BYTES = 32 << 20
"""A longer line is none of drumline's, and skipped."""
_ANCHOR_BYTES = 128
_MARK_BYTES = 1 << 20


def open_inside(root: Path, path: Path) -> BinaryIO | None:
    """A regular file for reading; None if there is none, or it lies outside of the folder, as a link might."""
    with suppress(OSError, ValueError):
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(os.path.realpath(root)):
            return None
        # Not a link that was put in its place just now, and not a pipe that nobody writes to.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    return None


def read_inside(root: Path, path: Path, *, most_bytes: int = 4 << 20) -> bytes:
    """The beginning of a file; empty if there is none."""
    with suppress(OSError):
        file = open_inside(root, path)
        if file is not None:
            with file:
                return file.read(most_bytes)
    return b""


@dataclass(frozen=True)
class Lines:
    """What was read. back_to: with `again`, the state that was marked where reading goes on; None: the beginning."""

    lines: list[bytes]
    again: bool = False
    back_to: Any = None
    left_bytes: int = 0
    """What the file has beyond these lines."""


@dataclass(frozen=True)
class _Mark:
    offset: int
    anchor: bytes
    """The bytes before that place: by them it is known again."""
    state: Any


class LineReader:
    """Follows one file."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._offset, self._anchor, self._skipping = 0, b"", False
        self._marks: list[_Mark] = []
        self._inode: tuple[int, int] | None = None

    def mark(self, state: Any) -> None:
        """Remember what the reader of the lines has now: it can be taken back to this. Now and then is enough."""
        if self._offset - (self._marks[-1].offset if self._marks else 0) >= _MARK_BYTES:
            self._marks.append(_Mark(self._offset, self._anchor, state))

    def read(self) -> Lines:
        """The next complete lines, of about a MB."""
        try:
            file = open_inside(self._root, self._path)
            if file is None:
                return self._again(None) if self._offset else Lines([])
            with file:
                return self._read(file)
        except OSError:
            return Lines([])

    def _read(self, file: BinaryIO) -> Lines:
        status = os.fstat(file.fileno())
        inode, size = (status.st_dev, status.st_ino), status.st_size
        if self._offset and (inode != self._inode or size < self._offset or not self._is_known(file)):
            known = [mark for mark in self._marks if mark.offset <= size and _before(file, mark.offset) == mark.anchor]
            self._inode = inode
            return self._again(known[-1] if known else None)
        self._inode = inode
        chunk = _CHUNK_BYTES
        while True:
            file.seek(self._offset)
            content = file.read(chunk)
            end = content.rfind(b"\n") + 1
            if end or len(content) < chunk:
                break
            if chunk >= _LONGEST_BYTES:
                self._skipping, end = True, len(content)
                break
            chunk *= 2
        if not end:
            return Lines([])
        self._offset += end
        self._anchor = _before(file, self._offset)
        lines = content[:end].split(b"\n")[:-1] if content[end - 1 : end] == b"\n" else []
        if self._skipping and lines:
            lines, self._skipping = lines[1:], False
        return Lines(lines, left_bytes=max(0, size - self._offset))

    def _is_known(self, file: BinaryIO) -> bool:
        return _before(file, self._offset) == self._anchor

    def _again(self, mark: _Mark | None) -> Lines:
        """Go back to a mark, or to the beginning."""
        self._offset, self._anchor, self._skipping = (mark.offset, mark.anchor, False) if mark else (0, b"", False)
        self._marks = [each for each in self._marks if mark and each.offset <= mark.offset]
        return Lines([], again=True, back_to=mark.state if mark else None, left_bytes=1)


def _before(file: BinaryIO, offset: int) -> bytes:
    start = max(0, offset - _ANCHOR_BYTES)
    file.seek(start)
    return file.read(offset - start)
