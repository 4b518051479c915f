"""Copies of a host's slots in the memory of other hosts: a lost host then costs no more than a lost rank.

Each rank sends what it has sealed, byte for byte, to a rank of the next host, by threads and over connections of their
own, while training goes on. A copy has the checksums of what it was made of, and is verified by them before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from drumline.snapshots.folder import Snapshots
from drumline.snapshots.slots import HEADER_BYTES, Reserved, Slot

_AT_ONCE_BYTES = 64 << 20
_IMAGE, _ANSWER = 0, 1
"""Tags: two hosts may each send to the other at the same time."""


@dataclass(frozen=True)
class Route:
    """Where the slots of a rank are copied to, and whose copies it keeps."""

    targets: tuple[int, ...]
    sources: dict[int, int]
    """By rank: which part of this host's memory its copy is."""
    parts: int
    """Of this host's memory: those of its own ranks, then the copies."""


def route(hosts: Sequence[Sequence[int]], rank: int, copies: int) -> Route:
    """So that each slot is in the memory of so many hosts, or of all if there are fewer.

    hosts: the ranks of each
    """
    copies = min(copies, len(hosts))
    at = next(index for index, ranks in enumerate(hosts) if rank in ranks)
    own, place = hosts[at], hosts[at].index(rank)
    following = [hosts[(at + distance) % len(hosts)] for distance in range(1, copies)]
    copied = [each for distance in range(1, copies) for each in enumerate(hosts[at - distance])]
    return Route(
        targets=tuple(ranks[place % len(ranks)] for ranks in following),
        sources={
            source: len(own) + part for part, (number, source) in enumerate(copied) if own[number % len(own)] == rank
        },
        parts=len(own) + len(copied),
    )


class Remote:
    """One per rank; all ranks make theirs, and call `exchange` once for each snapshot."""

    def __init__(self, snapshots: Snapshots, way: Route) -> None:
        self._snapshots, self._way = snapshots, way
        self._group = dist.new_group(backend="gloo")
        self._kept: dict[int, list[Reserved]] = {}
        """By rank: memory for its copies."""
        self._threads = ThreadPoolExecutor(
            max(1, len(way.targets) + len(way.sources)), thread_name_prefix="snapshot-copies"
        )

    def exchange(self, slot: Slot | None) -> None:
        """Send what was sealed, and keep what other ranks send; in a thread. OSError: there is no room for that.

        slot: None if this rank has nothing for this snapshot
        """
        newest = next(iter(self._snapshots.complete()), None)
        spared = newest.slots if newest else ()
        image = slot.image if slot else None
        work = [self._threads.submit(self._send, image, target) for target in self._way.targets]
        work += [self._threads.submit(self._keep, source, spared) for source in self._way.sources]
        errors = [error for each in work if (error := each.exception()) is not None]
        for error in errors:
            if isinstance(error, RuntimeError):  # a rank that is gone: whoever watches them knows
                return
            raise error

    def close(self) -> None:
        """Other processes may write to the copies. Their content stays."""
        for reserved in self._kept.values():
            for each in reserved:
                each.close()
        self._kept = {}

    def stop(self) -> None:
        """No more of them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _send(self, image: Tensor | None, target: int) -> None:
        size = torch.tensor([0 if image is None else image.numel()])
        dist.send(size, target, self._group, _IMAGE)
        if image is None:
            return
        dist.recv(wanted := torch.empty(1, dtype=torch.int64), target, self._group, _ANSWER)
        if wanted.item():
            for piece in (*torch.split(image[HEADER_BYTES:], _AT_ONCE_BYTES), image[:HEADER_BYTES]):
                dist.send(piece, target, self._group, _IMAGE)

    def _keep(self, source: int, spared: Sequence[os.PathLike[str]]) -> None:
        """spared: the newest complete snapshot, which is not written over"""
        dist.recv(size := torch.empty(1, dtype=torch.int64), source, self._group, _IMAGE)
        if not (size_bytes := int(size.item())):
            return
        failed: OSError | None = None
        try:
            reserved = self._reserved(source, size_bytes)
        except OSError as error:
            failed = error
        dist.send(torch.tensor([int(failed is None)]), source, self._group, _ANSWER)
        if failed is not None:
            raise failed
        slot = next(each for each in reserved if each.path not in spared)
        slot.open()
        for piece in torch.split(slot.image[HEADER_BYTES:], _AT_ONCE_BYTES):
            dist.recv(piece, source, self._group, _IMAGE)
        dist.recv(header := torch.empty(HEADER_BYTES, dtype=torch.uint8), source, self._group, _IMAGE)
        slot.image[:HEADER_BYTES] = header
        os.utime(slot.path)  # a mapping does not tell when it was written to

    def _reserved(self, source: int, size: int) -> list[Reserved]:
        reserved = self._kept.get(source, [])
        if any(len(each) != size for each in reserved):
            for each in reserved:
                each.close()
            reserved = []
        if not reserved:
            self._snapshots.make_folder()
            paths = self._snapshots.slots_of(self._way.sources[source], self._way.parts)
            try:
                for path in paths:
                    reserved.append(Reserved(path, size, device=torch.device("cpu")))
            except OSError:
                for each in reserved:
                    each.close()
                raise
            self._kept[source] = reserved
        return reserved
