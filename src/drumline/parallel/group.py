"""Several ranks: the process group they join, and how they agree on something.

What ranks exchange before training goes through the rendezvous store as JSON, so that it works before, and without,
any collective. On several hosts it is signed: torch's store asks nobody who he is.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from drumline.config import Backend
from drumline.errors import ConfigError, DrumlineError
from drumline.lazy import room
from drumline.parallel.heartbeat import ATTEMPT, waiting_for, working
from drumline.parallel.world import Place, World

T = TypeVar("T")

_PATIENCE = timedelta(days=1)
"""How long ranks wait for one that tokenizes text or reads a checkpoint: if it dies, the launcher kills them sooner."""
_GOODBYE = timedelta(seconds=5)
_LISTENS_S = 5.0
_LEFT: list[dist.ProcessGroup | None] = []
_TURNS = itertools.count()
"""Numbers of exchanges, of the process: the store of a second run in it may still have the values of the first one."""


@dataclass(frozen=True)
class Group(World):
    """All ranks of a process group, from the view of one of them."""

    store: Store
    """The store for messages between ranks."""
    key: str = field(default="", repr=False)
    """What messages are signed with; empty: they are not."""
    _turn: Iterator[int] = field(default=_TURNS, repr=False)

    @property
    def is_group(self) -> bool:
        return True

    def gather(self, value: Any) -> list[Any]:
        turn = next(self._turn)
        _write(self.store, self.key, f"drumline/{turn}/{self.rank}", value)
        keys = [f"drumline/{turn}/{rank}" for rank in range(self.size)]
        with waiting_for("messages from the other ranks"):
            self.store.wait(keys, _PATIENCE)
        values = [_read(self.store, self.key, key) for key in keys]
        # All ranks are in this turn, so they have read the one before: a long run must not fill rank 0's memory.
        self.store.delete_key(f"drumline/{turn - 1}/{self.rank}")
        return values

    def on_all_ranks(self, work: Callable[[], T]) -> T:
        result, error = _attempt(work)
        problems = self.gather(None if error is None else [socket.gethostname(), error.problem, error.fix])
        self._raise_first(problems, error)
        return result  # type: ignore[return-value]

    def on_rank0(self, work: Callable[[], T]) -> T:
        result, error = _attempt(work) if self.is_rank0 else (None, None)
        outcomes = self.gather([None if error is None else [socket.gethostname(), error.problem, error.fix], result])
        self._raise_first([outcomes[0][0]], error)
        return result if self.is_rank0 else outcomes[0][1]  # type: ignore[return-value]

    def _raise_first(self, problems: Sequence[Any], own: DrumlineError | None) -> None:
        for rank, problem in enumerate(problems):
            if problem is not None:
                if self.is_rank0 and own is not None:
                    raise own
                where = "" if len(problems) == 1 else f"rank {rank} on {problem[0]}: "
                error = DrumlineError(where + problem[1], fix=problem[2])
                error.reported = not self.is_rank0
                raise error

    def post(self, key: str, value: Any, *, instead_of: str) -> None:
        _write(self.store, self.key, f"drumline/{key}", value)
        self.store.delete_key(f"drumline/{instead_of}")

    def posted(self, keys: Sequence[str]) -> list[Any] | None:
        if not keys:
            return []
        names = [f"drumline/{key}" for key in keys]
        if not self.store.check(names):
            return None
        return [_read(self.store, self.key, name) for name in names]

    def broadcast(self, tensors: Sequence[Tensor], *, source: int = 0) -> None:
        for tensor in tensors:
            there = tensor if tensor.device == self.device else tensor.to(self.device)
            with waiting_for(f"the tensors of rank {source}"):
                dist.broadcast(there, source)
            if there is not tensor:
                tensor.copy_(there)

    def sum(self, tensor: Tensor) -> Tensor:
        with waiting_for("a sum over all ranks"):
            dist.all_reduce(tensor)
        return tensor


def _write(store: Store, key: str, name: str, value: Any) -> None:
    text = json.dumps(value)
    store.set(name, room("network").signed(key, name, text) if key else text)


def _read(store: Store, key: str, name: str) -> Any:
    """RuntimeError, worth a restart with another store, if someone else wrote there."""
    content = store.get(name)
    try:
        return json.loads(room("network").verified(key, name, content.decode()) if key else content)
    except ValueError:
        raise RuntimeError(f"someone without the run's secret wrote {name} in the store of the ranks") from None


def _attempt(work: Callable[[], T]) -> tuple[T | None, DrumlineError | None]:
    try:
        with working():
            return work(), None
    except DrumlineError as error:
        return None, error


def join_group(place: Place, device: torch.device, backend: Backend) -> Group:
    """Join the other ranks; a process that has already joined keeps its world."""
    name = check_backend(backend, device)
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.size), LOCAL_RANK=str(place.local_rank))
    os.environ.update(MASTER_ADDR=place.master_addr, MASTER_PORT=str(place.master_port))
    key = os.environ.get("DRUMLINE_SECRET", "")
    if not dist.is_initialized():
        store = _rendezvous(place)
        if name == "gloo" and place.size > 1:
            _choose_interface(place, store, key)
        dist.init_process_group(name, store=store, rank=place.rank, world_size=place.size)
        atexit.register(leave_group)
    return Group(place, device, dist.distributed_c10d._get_default_store(), key)


def _rendezvous(place: Place) -> Store:
    _wait_for_rank_0(place)
    try:
        return _store(place)
    except dist.DistNetworkError as error:
        where = f"{place.master_addr}:{place.master_port}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(
                f"the rendezvous port {place.master_port} of rank 0 on {socket.gethostname()} is in use",
                fix="choose a free port: the same MASTER_PORT (or --master_port) on every host",
            ) from None
        raise ConfigError(
            f"rank {place.rank} on {socket.gethostname()} cannot reach rank 0 at {where}: {str(error).splitlines()[0]}",
            fix=f"start rank 0, and check address, firewall and route: nc -vz {where.replace(':', ' ')}",
        ) from None


def _store(place: Place) -> Store:
    """Torch's store. It would listen on all interfaces, but a supervisor knows at which address it will be reached."""
    if place.rank == 0 and ATTEMPT in os.environ:
        with contextlib.suppress(OSError):  # this process has it already, or torch will say what is wrong
            listener = room("network").listener(place.master_addr, place.master_port)
            return TCPStore(
                place.master_addr,
                place.master_port,
                place.size,
                is_master=True,
                multi_tenant=True,
                timeout=dist.default_pg_timeout,
                master_listen_fd=listener.detach(),
            )
    return next(iter(rendezvous("env://")))[0]  # type: ignore[no-any-return]


def _choose_interface(place: Place, store: Store, key: str) -> None:
    """Let gloo use the interface that leads to the other hosts.

    Left to itself, it announces what this host's name resolves to. On Debian and Ubuntu that is 127.0.1.1, where no
    other host finds this one.
    """
    network = room("network")
    here = network.address_towards(place.master_addr)
    _write(store, key, f"drumline/address/{place.rank}", here or "")
    if not network.gloo_is_misled(os.environ):
        return
    interface = network.interface_towards(place.master_addr)
    if interface is None:  # rank 0 is on this host: the others know how they got here
        names = [f"drumline/address/{rank}" for rank in range(place.size)]
        with waiting_for("the other ranks"):
            store.wait(names, _PATIENCE)
        reached = [_read(store, key, name) for name in names]
        interface = next(filter(None, (network.interface_towards(address) for address in reached if address)), None)
    if interface is not None:  # else all ranks are on this host
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _wait_for_rank_0(place: Place) -> None:
    """Wait until it listens, but only for a moment: torch, once refused, waits half a second before it retries."""
    until, pause_s = time.monotonic() + _LISTENS_S, 0.01
    while place.rank > 0 and time.monotonic() < until:
        try:
            with socket.create_connection((place.master_addr, place.master_port), timeout=_LISTENS_S):
                return
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(0.1, 1.5 * pause_s)  # hundreds of ranks may try
        except OSError:
            return  # torch will report what is wrong


def leave_group() -> None:
    """Destroy the process group. Rank 0, which may run the store, goes last: others may still be reading."""
    if not dist.is_initialized():
        return
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(RuntimeError):  # a peer may have died
        if rank > 0:
            store.set(f"drumline/left/{rank}", "")
        elif isinstance(sys.exc_info()[1], DrumlineError | None):  # after a crash, do not wait for anyone
            store.wait([f"drumline/left/{other}" for other in range(1, size)], _GOODBYE)
    # Freeing a gloo group holds the GIL while it joins gloo's threads, and one of them may need the GIL to release
    # the last tensor that it reduced. So a group is kept until the process exits.
    _LEFT.append(dist.group.WORLD)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def check_backend(backend: Backend, device: torch.device) -> str:
    """The backend to use; refuses one that cannot work here."""
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise ConfigError(
            f"the nccl backend needs CUDA GPUs, but these ranks use {device.type}", fix="use --backend gloo"
        )
    return backend
