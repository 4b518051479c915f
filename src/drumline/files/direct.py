"""Large files past the page cache: written and read at the disk's speed, without memory for a second copy.

What is read this way comes from the disk, not from memory that was filled when it was written. File systems that do not
know it (O_DIRECT), such as tmpfs, are written and read as usual.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy

_PIECE_BYTES = 16 << 20
"""Written and read at once."""
_ALIGNED = 4096
_buffers = threading.local()


def write_direct(
    path: Path, chunks: Sequence[memoryview], *, before: Callable[[int], None] = lambda written: None
) -> tuple[int, str]:
    """Write and flush a new file, and hash it meanwhile; gives its size and sha256.

    before: called with what is written so far before each piece is written, and at the end
    """
    buffer, filled, written, digest = _buffer(), 0, 0, hashlib.sha256()
    pieces = numpy.frombuffer(buffer, "u1")
    descriptor = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(length: int) -> None:
        nonlocal written
        before(written)
        digest.update(buffer[:length])
        _write(descriptor, buffer[:length])
        written += length

    try:
        for chunk in chunks:
            rest = chunk
            while rest:
                taken = min(len(rest), len(buffer) - filled)
                # By numpy, which lets other threads go on meanwhile.
                numpy.copyto(pieces[filled : filled + taken], numpy.frombuffer(rest[:taken], "u1"))
                rest, filled = rest[taken:], filled + taken
                if filled == len(buffer):
                    write(filled)
                    filled = 0
        if filled:
            write(filled)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    before(written)
    return written, digest.hexdigest()


def sha256_on_disk(path: Path) -> str:
    """The hash of what the disk has of a file."""
    buffer, digest = _buffer(), hashlib.sha256()
    descriptor = _opened(path, os.O_RDONLY)
    try:
        while read := os.readv(descriptor, [buffer]):
            digest.update(buffer[:read])
            if read % _ALIGNED:
                _as_usual(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def _buffer() -> memoryview:
    """This thread's own, at an address that the disk can write from; kept, since new pages cost more than copying."""
    if not hasattr(_buffers, "own"):
        _buffers.own = memoryview(mmap.mmap(-1, _PIECE_BYTES))
    own: memoryview = _buffers.own
    return own


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # Some file systems create the file before they refuse.
    return os.open(path, flags & ~os.O_EXCL | os.O_CLOEXEC, 0o666)


def _write(descriptor: int, data: memoryview) -> None:
    if len(data) % _ALIGNED:  # the end of the file
        whole = len(data) // _ALIGNED * _ALIGNED
        _write(descriptor, data[:whole])
        _as_usual(descriptor)
        data = data[whole:]
    while data:
        try:
            count = os.write(descriptor, data)
        except OSError as error:
            if error.errno != errno.EINVAL or not _as_usual(descriptor):
                raise
            continue
        data = data[count:]
        if count % _ALIGNED:  # a disk that is almost full: the next one fails
            _as_usual(descriptor)


def _as_usual(descriptor: int) -> bool:
    """Go on through the page cache; returns whether that is new."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return bool(flags & os.O_DIRECT)
