"""Memory that is really there before it is used: mapped, filled with pages by several threads, and pinned for a GPU.

A new page costs many times what a copy into an old one does, and a page of a full /dev/shm kills whoever touches it
(SIGBUS). So all of it is reserved at once, and OSError says if there is no room.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

_POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE, of Linux 5.14: as writing to every page, but reports what would kill the process."""
_PIECE_BYTES = 64 << 20
_PORTABLE = 1


def threads_for_copies() -> int:
    """How many threads may work beside training, of all the ranks on this machine."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2 // ranks))


class Memory:
    """A mapping of a number of bytes; of a file if one is given, which outlives this process."""

    def __init__(self, size: int, *, file: Path | None = None, device: torch.device) -> None:
        """device: if a GPU, the memory is pinned, so that copies from and to it run at full speed"""
        self.is_pinned = False
        if file is None:
            self._map = mmap.mmap(-1, size)
        else:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(descriptor).st_size != size:
                    os.ftruncate(descriptor, 0)
                    os.ftruncate(descriptor, size)
                self._map = mmap.mmap(descriptor, size)
                self._reserve(descriptor)
            finally:
                os.close(descriptor)
        if file is None:
            self._reserve(None)
        if device.type == "cuda":
            self._pin(device)

    def __len__(self) -> int:
        return len(self._map)

    @property
    def bytes(self) -> memoryview:
        return memoryview(self._map)

    def tensor(self) -> torch.Tensor:
        """uint8, on the CPU."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def _reserve(self, descriptor: int | None) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, size = self._address, len(self)

        def populate(start: int) -> int:
            length = min(_PIECE_BYTES, size - start)
            failed = libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _POPULATE_WRITE)
            return ctypes.get_errno() if failed else 0

        with ThreadPoolExecutor(threads_for_copies(), thread_name_prefix="memory") as threads:
            failures = {code for code in threads.map(populate, range(0, size, _PIECE_BYTES)) if code}
        if failures == {errno.EINVAL}:  # an older kernel
            if descriptor is not None:
                os.posix_fallocate(descriptor, 0, size)
            ctypes.memset(address, 0, size)
        elif failures:
            raise OSError(errno.ENOSPC, f"there is no room for {size:,} bytes")

    def _pin(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self._address
            self.is_pinned = int(cuda.cudaHostRegister(address, len(self), _PORTABLE)) == 0
            if self.is_pinned:
                weakref.finalize(self, cuda.cudaHostUnregister, address)
                return
            try:  # the error would be reported by whatever is launched next
                torch.zeros(1, device=device)
            except RuntimeError:
                return
