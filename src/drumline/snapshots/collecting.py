"""A snapshot of a state that is spread over ranks: the memory of each host has some rows, all of them together all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.errors import CheckpointError
from drumline.parallel import World
from drumline.pieces import Shapes, Stored, check_begins, merged, shapes_as_json, shapes_from_json
from drumline.snapshots.folder import UNREADABLE, Snapshots, set_aside
from drumline.snapshots.memory import threads_for_copies
from drumline.snapshots.slots import Content, DamagedError, Header, read_header, read_slot

Ranges = Mapping[str, Sequence[tuple[int, int]]]
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Collected:
    """A verified snapshot of which this host has some rows."""

    step: int
    about: dict[str, Any]
    folder: Path
    stored: Stored
    """What is in this host's memory."""
    shapes: Shapes
    here: list[Ranges]
    """The rows of each tensor that each rank can read in the memory of its host."""
    hosts: int
    headers: dict[Path, Header | None]

    def check_still_there(self) -> None:
        """CheckpointError if it was written to since it was verified."""
        if any(_header(path) != header for path, header in self.headers.items()):
            problem = f"the snapshot in {self.folder} was written to while it was read"
            raise CheckpointError(problem, fix="run the command again")


def ranks_by_host(memory: Path, world: World) -> list[list[int]]:
    """The ranks of each host, that is, of those that share this memory; all ranks call it."""
    own = f"the host of rank {world.rank}"
    with suppress(OSError):  # else no memory is shared
        about = os.stat(memory)
        own = f"{_BOOT.read_text(encoding='utf-8').strip()} {about.st_dev} {about.st_ino}"
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(world.gather(own)):
        hosts.setdefault(host, []).append(rank)
    return list(hosts.values())


def collected(
    snapshots: Snapshots | None, world: World, *, after: int, warn: Callable[[str], None]
) -> Collected | None:
    """The newest snapshot after a step that hosts have between them; all ranks call it, and all get it or None.

    A rank reads nothing of it but what is in the memory of its host. snapshots: those there
    """
    hosts = ranks_by_host(snapshots.folder.parents[1] if snapshots else Path("none"), world)
    same = next(ranks for ranks in hosts if world.rank in ranks)
    damaged: list[str] = []
    own = []
    if snapshots and same[0] == world.rank:
        own = snapshots.complete(damaged=lambda path, error: damaged.append(set_aside(path, error)))
    listed = world.gather([[[each.step, each.token] for each in own], damaged])
    for text in (text for _, texts in listed for text in texts):
        warn(text)
    steps = sorted({(step, token) for each, _ in listed for step, token in each if step > after}, reverse=True)
    for step, token in steps:
        with ThreadPoolExecutor(threads_for_copies(), thread_name_prefix="verify") as threads:
            snapshot = _read(snapshots, step, token, same, world, threads, warn=warn)
        if snapshot is not None:
            return snapshot
    return None


def _read(
    snapshots: Snapshots | None,
    step: int,
    token: str,
    same: list[int],
    world: World,
    threads: ThreadPoolExecutor,
    *,
    warn: Callable[[str], None],
) -> Collected | None:
    every = snapshots.complete() if snapshots else []
    paths = next((each.slots for each in every if (each.step, each.token) == (step, token)), ())
    headers = {path: _header(path) for path in paths}
    parts: list[Content] = []
    damage: list[str] = []
    for number, path in enumerate(paths):
        verify = number % len(same) == same.index(world.rank)  # each rank some of those on its host
        try:
            device = world.device if verify else torch.device("cpu")
            parts.append(read_slot(path, threads, device=device, verify=verify))
        except UNREADABLE as error:
            damage += [set_aside(path, error)] if verify else [""]
    outcomes = world.gather(damage)
    for text in sorted({text for each in outcomes for text in each if text}):
        warn(text)
    if any(outcomes[rank] for rank in same):  # other hosts may have the same rows
        parts, headers = [], {}
    return _joined(step, parts, headers, same, world, warn=warn)


def _joined(
    step: int,
    parts: list[Content],
    headers: dict[Path, Header | None],
    same: list[int],
    world: World,
    *,
    warn: Callable[[str], None],
) -> Collected | None:
    stored = Stored.in_memory({name: tensor for part in parts for name, tensor in part.tensors.items()})
    own: list[Any] = [[], {}, None]
    if same[0] == world.rank:  # one for each host
        own = [shapes_as_json(stored.shapes), stored.rows(), parts[0].about if parts else None]
    listed = world.gather([same[0], *own])
    by_host = {host: rows for rank, (host, _, rows, _) in enumerate(listed) if rank == host}
    shapes = shapes_from_json([each for _, own, _, _ in listed for each in own])
    if not shapes:  # all of it is damaged
        return None
    try:
        for name, (_, shape) in shapes.items():
            ranges = merged((start, stop) for rows in by_host.values() for start, stop in rows.get(name, ()))
            check_begins(name, ranges[0][0], 0)
            check_begins(name, shape[0] if shape else 1, ranges[0][1])
    except ValueError as error:
        warn(f"the snapshot of step {step:,} is not used, since some of it is in the memory of no host here: {error}")
        return None
    return Collected(
        step=step,
        about=next(each for _, _, _, each in listed if each is not None),
        folder=next(iter(headers)).parent if headers else Path("none"),
        stored=stored,
        shapes=shapes,
        here=[by_host[host] for host, *_ in listed],
        hosts=sum(bool(rows) for rows in by_host.values()),
        headers=headers,
    )


def _header(path: Path) -> Header | None:
    try:
        return read_header(path)
    except DamagedError:
        return None
