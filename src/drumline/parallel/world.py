"""Who am I, who else is there: this process's place among the ranks, and how they agree on something.

A place comes from the environment: torchrun's variables (also set by every launcher that imitates it), or SLURM's. What
ranks tell each other before training goes through the rendezvous store as JSON, so that it works before, and without,
any collective.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from drumline.config import Backend, Device
from drumline.errors import ConfigError, DrumlineError
from drumline.parallel.hardware import fix_arithmetic, pick_device, quicken_pinning
from drumline.parallel.heartbeat import waiting_for, working

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""How long ranks wait for one that prepares text or reads a checkpoint: the launcher ends them sooner if it dies."""
_GOODBYE = timedelta(seconds=5)
_LISTENS_S = 5.0
_LEFT: list[dist.ProcessGroup | None] = []
_SLURM_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class Place:
    """Where a process stands among all ranks of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


def find_place(environ: Mapping[str, str]) -> Place:
    """This process's place, from the variables its launcher set; a single process where there are none."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return Place(
            rank=_number(environ, "RANK"),
            size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", environ["RANK"]),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT", "29500"),
        )
    # Only srun sets the number of a step's tasks; a batch script knows how many are to come, and is none of them.
    size = _number(environ, "SLURM_STEP_NUM_TASKS", "1")
    if size > 1:
        hosts = slurm_hosts(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "localhost")))
        job = _number(environ, "SLURM_JOB_ID", "0") * 7 + _number(environ, "SLURM_STEP_ID", "0")
        return Place(
            rank=_number(environ, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environ, "SLURM_LOCALID", "0"),
            master_addr=environ.get("MASTER_ADDR", hosts[0]),
            master_port=_number(environ, "MASTER_PORT", str(_SLURM_PORTS[job % len(_SLURM_PORTS)])),
        )
    return Place()


def slurm_hosts(names: str) -> list[str]:
    """SLURM's short form of a host list, written out: "a[1-2,07],b" -> a1 a2 a07 b."""
    hosts = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", names):
        stem, _, inside = part.partition("[")
        for piece in inside.rstrip("]").split(",") if inside else [""]:
            first, _, last = piece.partition("-")
            numbers = range(int(first), int(last) + 1) if last else [first]
            hosts += [f"{stem}{number:0{len(first)}d}" if last else f"{stem}{number}" for number in numbers]
    return hosts


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    value = environ.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"the variable {name} is {value!r}, not a number", fix=f"unset {name}, or let torchrun or srun set it"
        ) from None


@dataclass(frozen=True)
class World:
    """All ranks of a run, as one of them sees it."""

    place: Place
    device: torch.device
    store: Store | None = None
    """Where ranks leave word for each other; None for a single process."""
    _turn: Iterator[int] = field(default_factory=itertools.count, repr=False)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value (anything JSON can hold), by rank; all ranks call it at the same point."""
        if self.store is None:
            return [value]
        turn = next(self._turn)
        self.store.set(f"drumline/{turn}/{self.rank}", json.dumps(value))
        keys = [f"drumline/{turn}/{rank}" for rank in range(self.size)]
        with waiting_for("word from the other ranks"):
            self.store.wait(keys, _PATIENCE)
        return [json.loads(self.store.get(key)) for key in keys]

    def together(self, work: Callable[[], T]) -> T:
        """Do the same on every rank; an error of one is raised on all, and told by rank 0 with whose it was."""
        result, error = _attempt(work)
        told = self.gather(None if error is None else [socket.gethostname(), error.problem, error.fix])
        self._raise_first(told, error)
        return result  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T]) -> T:
        """Do something on rank 0 alone; its result (anything JSON can hold), or its error, is everyone's."""
        result, error = _attempt(work) if self.is_main else (None, None)
        told = self.gather([None if error is None else [socket.gethostname(), error.problem, error.fix], result])
        self._raise_first([told[0][0]], error)
        return result if self.is_main else told[0][1]  # type: ignore[return-value]

    def _raise_first(self, told: Sequence[Any], own: DrumlineError | None) -> None:
        for rank, problem in enumerate(told):
            if problem is not None:
                if self.is_main and own is not None:
                    raise own
                where = "" if len(told) == 1 else f"rank {rank} on {problem[0]}: "
                error = DrumlineError(where + problem[1], fix=problem[2])
                error.told = not self.is_main
                raise error

    def post(self, key: str, value: Any) -> None:
        """Leave word (anything JSON can hold) for whoever asks with `posted`."""
        if self.store is not None:
            self.store.set(f"drumline/{key}", json.dumps(value))

    def posted(self, keys: Sequence[str]) -> list[Any] | None:
        """What was posted under these keys; None as long as one is missing. Does not wait."""
        if not keys:
            return []
        names = [f"drumline/{key}" for key in keys]
        if self.store is None or not self.store.check(names):
            return None
        return [json.loads(self.store.get(name)) for name in names]

    def broadcast(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        """Make everyone's tensors those of one rank."""
        if self.store is not None:
            for tensor in tensors:
                there = tensor if tensor.device == self.device else tensor.to(self.device)
                with waiting_for(f"the tensors of rank {source}"):
                    dist.broadcast(there, source)
                if there is not tensor:
                    tensor.copy_(there)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on each of them."""
        if self.store is not None:
            with waiting_for("a sum over all ranks"):
                dist.all_reduce(tensor)
        return tensor


def _attempt(work: Callable[[], T]) -> tuple[T | None, DrumlineError | None]:
    try:
        with working():
            return work(), None
    except DrumlineError as error:
        return None, error


def join(*, device: Device = "auto", backend: Backend = "auto", bitwise: bool = False) -> World:
    """Take this process's place among the ranks. The group is torn down by `leave`, or when the process ends.

    bitwise: also make this process compute the same bits as any other would
    """
    place = find_place(os.environ)
    where = pick_device(device)
    if bitwise:
        fix_arithmetic(where)
    if where.type == "cuda":
        quicken_pinning()
        # Before anything else touches CUDA: a rank that starts on GPU 0 leaves a context of its own there.
        where = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    if place.size == 1 and "RANK" not in os.environ:
        return World(place, where)
    name = check_backend(backend, where)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size), LOCAL_RANK=str(place.local_rank))
    os.environ.update(MASTER_ADDR=place.master_addr, MASTER_PORT=str(place.master_port))
    if not dist.is_initialized():
        store = _rendezvous(place)
        dist.init_process_group(name, store=store, rank=place.rank, world_size=place.size)
        atexit.register(leave)
    return World(place, where, dist.distributed_c10d._get_default_store())


def _rendezvous(place: Place) -> Store:
    _wait_for_rank_0(place)
    try:
        store, _, _ = next(iter(rendezvous("env://")))
    except dist.DistNetworkError as error:
        where = f"{place.master_addr}:{place.master_port}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(
                f"port {place.master_port}, where rank 0 on {socket.gethostname()} is to meet the others, is in use",
                fix="choose a free one: the same MASTER_PORT (or --master_port) on every host",
            ) from None
        raise ConfigError(
            f"rank {place.rank} on {socket.gethostname()} cannot reach rank 0 at {where}: {str(error).splitlines()[0]}",
            fix=f"start rank 0, and check the address, the firewall and the route: nc -vz {where.replace(':', ' ')}",
        ) from None
    return store  # type: ignore[no-any-return]


def _wait_for_rank_0(place: Place) -> None:
    """Until it listens, or a moment has passed: torch, refused once, waits half a second before it asks again."""
    until, pause_s = time.monotonic() + _LISTENS_S, 0.01
    while place.rank > 0 and time.monotonic() < until:
        try:
            with socket.create_connection((place.master_addr, place.master_port), timeout=_LISTENS_S):
                return
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(0.1, 1.5 * pause_s)  # there may be hundreds that ask
        except OSError:
            return  # torch will say what is wrong


def leave() -> None:
    """Tear the process group down. Rank 0, which may keep the store, goes last: others may still read there."""
    if not dist.is_initialized():
        return
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(RuntimeError):  # a peer that died leaves nothing to say goodbye to
        if rank > 0:
            store.set(f"drumline/left/{rank}", "")
        elif isinstance(sys.exc_info()[1], DrumlineError | None):  # after a crash nobody is worth waiting for
            store.wait([f"drumline/left/{other}" for other in range(1, size)], _GOODBYE)
    # Whoever frees a gloo group holds the interpreter's lock while it joins gloo's threads, and one of them may just
    # want that lock to let go of the last tensor it reduced. So a group that was left is kept until the process ends.
    _LEFT.append(dist.group.WORLD)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def check_backend(backend: Backend, device: torch.device) -> str:
    """The backend to use; refuses one that cannot work here."""
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise ConfigError(
            f"the nccl backend needs CUDA GPUs, and these ranks compute on {device.type}", fix="use --backend gloo"
        )
    return backend
