"""A slot: memory that outlives its process, with the state of one step, sealed when it is complete.

    header   step, and the checksum of the seal; zeros while the slot is being written
    data     the tensors, one after the other
    seal     JSON: everything that is not a tensor, where each tensor is, and checksums of each piece of the data: those
             that a GPU computes (sums.py) for what was on one, crc32 for the rest

The header is written last. So a slot whose process died in between is never used, and neither is one with a bit that
has another value.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.files import Lock
from drumline.snapshots.layout import Layout
from drumline.snapshots.memory import Memory
from drumline.snapshots.sums import sums

_HEADER, _CHECKSUM = struct.Struct("=8sQQQI12s"), struct.Struct("=I")
"""Magic, step, size of the data, length and checksum of the seal, token of the ranks that wrote it; then a CHECKSUM."""
_MAGIC = b"drumline"
HEADER_BYTES = 4096
"""The data begin after that."""
_PIECE_BYTES = 16 << 20
_SEAL_BYTES = 64 << 10
"""Room for a seal beyond what it took at first: it grows with the losses and the detours of a run."""


class SlotTakenError(OSError):
    """Another process of this run writes to the slot: two launchers may share a machine, and one snapshot is enough."""


class DamagedError(Exception):
    """A slot that was sealed does not have what its seal says."""


@dataclass(frozen=True)
class Header:
    """What a slot says about itself."""

    step: int
    data_bytes: int
    seal_bytes: int
    seal_checksum: int
    token: str


@dataclass(frozen=True)
class Content:
    """What a slot holds, verified."""

    about: dict[str, Any]
    tensors: dict[str, Tensor]
    memory: Memory
    """Where the tensors are; they last as long as it does."""


class Reserved:
    """The memory of a slot. It belongs to this process until that ends."""

    def __init__(self, path: Path, size: int, *, device: torch.device) -> None:
        """OSError: there is no room for it"""
        self.path = path
        self._lock = Lock(path)
        if not self._lock.take():
            self._lock.close()
            raise SlotTakenError(f"another process writes to {path}")
        try:
            self._memory = Memory(size, file=path, device=device)
        except OSError:
            path.unlink(missing_ok=True)
            self._lock.close()
            raise

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def image(self) -> Tensor:
        """All of it, as uint8: header, data and seal."""
        return self._memory.tensor()

    def open(self) -> None:
        """From now on the slot holds nothing."""
        self._memory.bytes[: _HEADER.size + _CHECKSUM.size] = bytes(_HEADER.size + _CHECKSUM.size)

    def close(self) -> None:
        """Another process may write to it. Its content stays."""
        self._lock.close()


class Slot(Reserved):
    """A slot to write a state to."""

    def __init__(self, path: Path, layout: Layout, *, device: torch.device) -> None:
        """OSError: there is no room for it"""
        checks = 64 * (layout.size // _PIECE_BYTES + 2)
        room = _SEAL_BYTES + 2 * len(json.dumps(layout.as_json())) + checks
        super().__init__(path, HEADER_BYTES + layout.size + room, device=device)
        self.layout = layout
        self.data = self.image[HEADER_BYTES : HEADER_BYTES + layout.size]

    def seal(
        self, step: int, token: str, about: dict[str, Any], threads: Executor, summed: list[list[int]] | None = None
    ) -> None:
        """The data are complete; from now on the slot holds them.

        summed: the sums of what was on a GPU, if that has computed them
        """
        since = self.layout.on_device if summed is not None else 0
        data = self._memory.bytes[HEADER_BYTES + since : HEADER_BYTES + self.layout.size]
        checks = {"since": since, "sums": summed or [], "pieces": list(threads.map(zlib.crc32, _pieces(data)))}
        seal = json.dumps({"about": about, "tensors": self.layout.as_json(), **checks}).encode()
        place = self._memory.bytes[HEADER_BYTES + self.layout.size :]
        if len(seal) > len(place):
            raise OSError(f"{len(seal):,} bytes beside the tensors do not fit in {self.path}")
        place[: len(seal)] = seal
        fields = _HEADER.pack(_MAGIC, step, self.layout.size, len(seal), zlib.crc32(seal), token.encode())
        self._memory.bytes[: _HEADER.size + _CHECKSUM.size] = fields + _CHECKSUM.pack(zlib.crc32(fields))
        os.utime(self.path)  # a mapping does not tell when it was written to

    @property
    def bytes(self) -> int:
        """Of the data."""
        return self.layout.size


def read_header(path: Path) -> Header | None:
    """None if the slot holds nothing; DamagedError if there is something else in the header's place."""
    try:
        with path.open("rb") as file:
            text = file.read(_HEADER.size + _CHECKSUM.size)
    except OSError:
        return None
    if not any(text):
        return None
    fields = text[: _HEADER.size]
    if len(text) < _HEADER.size + _CHECKSUM.size or _CHECKSUM.unpack(text[_HEADER.size :])[0] != zlib.crc32(fields):
        raise DamagedError("its header does not match its checksum")
    magic, step, data_bytes, seal_bytes, seal_checksum, token = _HEADER.unpack(fields)
    if magic != _MAGIC:
        raise DamagedError("it has another format")
    return Header(step, data_bytes, seal_bytes, seal_checksum, token.rstrip(b"\0").decode(errors="replace"))


def read_slot(path: Path, threads: Executor, *, device: torch.device, verify: bool = True) -> Content:
    """What a sealed slot holds; DamagedError if it is not what was sealed.

    device: where the tensors are to be copied to; verify: also the data, which another process may have done
    """
    header = read_header(path)
    size = path.stat().st_size
    if header is None or HEADER_BYTES + header.data_bytes + header.seal_bytes > size:
        raise DamagedError("it is not as long as it says")
    memory = Memory(size, file=path, device=device)
    seal = bytes(memory.bytes[HEADER_BYTES + header.data_bytes :][: header.seal_bytes])
    if zlib.crc32(seal) != header.seal_checksum:
        raise DamagedError("its seal does not match its checksum")
    sealed = json.loads(seal)
    data = memory.tensor()[HEADER_BYTES : HEADER_BYTES + header.data_bytes]
    since = sealed["since"]
    if verify:
        pieces = threads.map(zlib.crc32, _pieces(memory.bytes[HEADER_BYTES + since : HEADER_BYTES + header.data_bytes]))
        if list(pieces) != sealed["pieces"] or sums(data[:since], device).tolist() != sealed["sums"]:
            raise DamagedError("its data do not match their checksums")
    layout = Layout.from_json(sealed["tensors"], header.data_bytes)
    return Content(sealed["about"], layout.views(data), memory)


def empty_slot(path: Path) -> None:
    """A damaged one holds nothing."""
    with suppress(OSError), path.open("r+b") as file:
        file.write(bytes(_HEADER.size + _CHECKSUM.size))


def _pieces(data: memoryview) -> list[memoryview]:
    return [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]


def is_in_use(path: Path) -> bool:
    """Whether a process that lives may write to a slot."""
    if not os.path.exists(path):
        return False
    lock = Lock(path)
    try:
        return not lock.take()
    finally:
        lock.close()
