"""What is unpacked to plan and to sample a text is kept on disk, up to a limit, and not unpacked again to encode it.

    unpacked.bin    the content of compressed files, one after the other
    unpacked.json   which files these are, and a hash of each piece of them

Both are in the folder of parts (see `journal`), written by the process that plans, and removed before the parts are
joined. Each piece is compared with its hash; from one that is damaged on, the file is unpacked again.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from drumline.encoding.unpacking import unpacked_ahead
from drumline.files import replace_text

KEPT_BYTES = 4 << 30
"""Of unpacked text; and never more than a quarter of what is free on the disk."""
PIECE_BYTES = 1 << 20

Serial = Callable[[BinaryIO], io.RawIOBase]
Place = tuple[int, list[tuple[int, int]]]
"""Where the content of a file begins, and size and crc32 of each of its pieces."""


class Kept:
    """Its `unpack` is that of a `Reading`."""

    def __init__(self, folder: Path) -> None:
        self._content, self._index = folder / "unpacked.bin", folder / "unpacked.json"
        self._places: dict[str, Place] | None = None
        self._file: io.FileIO | None = None
        self._end = self._most_bytes = 0
        self._is_busy = False

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, each compressed file that is read to its end is kept."""
        self.remove()
        with self._content.open("wb", buffering=0) as file:
            self._file, self._places, self._end = file, {}, 0
            self._most_bytes = min(KEPT_BYTES, shutil.disk_usage(self._content.parent).free // 4)
            try:
                yield
            finally:
                self._file = None
        replace_text(self._index, json.dumps(self._places))

    def remove(self) -> None:
        self._index.unlink(missing_ok=True)
        self._content.unlink(missing_ok=True)
        self._places = {}

    def unpack(self, file: BinaryIO, compression: str, serial: Serial) -> io.RawIOBase:
        """As `unpacked_ahead`."""
        raw, status = unpacked_ahead(file, compression, serial), os.fstat(file.fileno())
        name = f"{os.path.abspath(file.name)} {status.st_size} {status.st_mtime_ns}"
        if (place := self._known().get(name)) is not None:
            with suppress(OSError):  # removed, since another process has encoded the last of it
                return _Again(self._content.open("rb", buffering=0), place, file, raw)
        if self._file is None or self._is_busy or not stat.S_ISREG(status.st_mode):
            return raw
        self._is_busy = True
        return _WrittenDown(raw, self, name)

    def _known(self) -> dict[str, Place]:
        if self._places is None:
            try:
                self._places = dict(json.loads(self._index.read_bytes()))
            except (OSError, ValueError):
                self._places = {}
        return self._places

    def write(self, piece: bytearray) -> bool:
        """Whether there is still room. A disk that is full only means that no more is kept."""
        with suppress(OSError):
            if self._file is not None and self._file.tell() + len(piece) <= self._most_bytes:
                return self._file.write(piece) == len(piece)
        self._most_bytes = self._end
        return False

    def leave(self, name: str, pieces: list[tuple[int, int]] | None) -> None:
        """A file was read. pieces: None unless all of it was written"""
        self._is_busy = False
        if self._file is None or self._places is None:
            return
        if pieces is not None:
            self._places[name] = (self._end, pieces)
            self._end = self._file.tell()
        else:
            with suppress(OSError):
                self._file.seek(self._end)
                self._file.truncate()


class _WrittenDown(io.RawIOBase):
    """Unpacked content that is written down as it is read."""

    def __init__(self, raw: io.RawIOBase, kept: Kept, name: str) -> None:
        self._raw, self._name = raw, name
        self._kept: Kept | None = kept
        self._piece, self._pieces = bytearray(), list[tuple[int, int]]()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # fewer kinds of buffer
        count: int = self._raw.readinto(buffer) or 0
        if self._kept is not None:
            self._piece += memoryview(buffer)[:count]
            if len(self._piece) >= PIECE_BYTES or not count:
                self._write(self._kept, ends=not count)
        return count

    def _write(self, kept: Kept, *, ends: bool) -> None:
        self._pieces.append((len(self._piece), crc32(self._piece)))
        fits = kept.write(self._piece)
        self._piece = bytearray()
        if ends or not fits:
            self._kept = None
            kept.leave(self._name, self._pieces if fits else None)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.leave(self._name, None)
            self._kept = None
        self._raw.close()
        super().close()


class _Again(io.RawIOBase):
    """Content that was kept; from damage on, what is unpacked again."""

    def __init__(self, content: io.FileIO, place: Place, file: BinaryIO, raw: io.RawIOBase) -> None:
        self._content, self._file, self._raw = content, file, raw
        start, self._pieces = place
        self._left, self._is_whole, self._done = iter(self._pieces), True, 0
        self._ready = memoryview(b"")
        content.seek(start)
        self._size, self._packed = sum(size for size, _ in self._pieces), os.fstat(file.fileno()).st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # fewer kinds of buffer
        if not self._ready and self._is_whole:
            self._next()
        if not self._is_whole:
            return self._raw.readinto(buffer) or 0
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)

    def _next(self) -> None:
        size, hash_ = next(self._left, (0, 0))
        piece = _read(self._content, size)
        if crc32(piece) == hash_ and len(piece) == size:
            self._ready, self._done = memoryview(piece), self._done + size
            self._file.seek(self._packed * self._done // max(1, self._size))  # from which progress is told
            return
        self._is_whole = False
        self._file.seek(0)
        while self._done and (again := self._raw.read(min(self._done, PIECE_BYTES))):
            self._done -= len(again)

    def close(self) -> None:
        self._content.close()
        self._raw.close()
        super().close()


def _read(file: io.FileIO, size: int) -> bytes:
    content = bytearray()
    while len(content) < size and (more := file.read(size - len(content))):
        content += more
    return bytes(content)
