"""Parts of files of stores on a disk, up to a number of bytes; shared by the processes of a host, trusted by none.

    FOLDER/NAME/REGION     a file with holes: the parts of a region, each at its place in it

Parts are compared with their hashes whenever they are read. So processes need no locks: those that write a part at the
same time write the same bytes, and what is damaged, half written or not there yet is simply not right, and is fetched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from drumline.files import LARGE_PART_BYTES

REGION_PARTS = 128
"""Parts in one file of the cache, which are removed together."""
_FULL, _LEFT = 0.8, 0.7
"""Shares of its size at which the regions that were used least recently are removed, and until what is left."""
_LOOKS = 10
"""How often that is checked while as many bytes are written as the cache may have."""
_USED_S = 60.0
"""A region that is read says so at most this often."""
_log = logging.getLogger(__name__)


class PartCache:
    """Parts of 16 KiB by name and number."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self._written = most_bytes  # an earlier run may have left more
        self._off = most_bytes < LARGE_PART_BYTES

    def read(self, parts: Path, number: int) -> bytes:
        """A part, or what is in its place; b"" if there is nothing. parts: the folder of its file"""
        region, place = divmod(number, REGION_PARTS)
        if self._off:
            return b""
        with suppress(OSError):
            file = os.open(parts / str(region), os.O_RDONLY)
            try:
                if time.time() - os.fstat(file).st_mtime > _USED_S:
                    os.utime(file)
                return os.pread(file, LARGE_PART_BYTES, place * LARGE_PART_BYTES)
            finally:
                os.close(file)
        return b""

    def write(self, parts: Path, number: int, content: bytes) -> None:
        """Keep a part; a disk that is full only means that it is not kept."""
        if self._off:
            return
        region, place = divmod(number, REGION_PARTS)
        try:
            if self._written > self._most_bytes / _LOOKS / self._processes:
                self._written = 0
                self._shrink()
            parts.mkdir(parents=True, exist_ok=True)
            file = os.open(parts / str(region), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(file, content, place * LARGE_PART_BYTES)
            finally:
                os.close(file)
        except OSError as error:
            self._off = True
            _log.warning("%s: %s; the run goes on without this cache", self._folder, error.strerror or error)
        self._written += len(content)

    def _shrink(self) -> None:
        """Two processes may do so at the same time: they remove the same files."""
        regions = sorted(self._regions())
        size = sum(each[1] for each in regions)
        if size <= self._most_bytes * (_FULL - 1 / _LOOKS):
            return
        for _, own, path in regions:
            if size <= self._most_bytes * _LEFT:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            size -= own

    def _regions(self) -> Iterator[tuple[float, int, str]]:
        """(last use, bytes on the disk, path) of all regions of all stores."""
        for parts in self._folder.glob("*/*/parts/*"):
            with suppress(FileNotFoundError), os.scandir(parts) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        stat = entry.stat()
                        yield stat.st_mtime, stat.st_blocks * 512, entry.path
