"""Which host runs the rendezvous store: a fixed one, or the holder of a lease in a shared folder.

The lease is a file `epoch-N.json`, created by the first host and touched every second. A host that can neither reach
the leader nor sees its lease touched creates the next epoch and becomes the leader; the previous leader finds the newer
epoch and follows. Ages are measured by the reader's own clock since it saw the file change: hosts' clocks may differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from drumline.errors import ConfigError
from drumline.network import Endpoint, address_towards, find_interfaces, is_loopback, resolve, user_of, why_not

_TOUCH_S, _STALE_S, _PROBE_S, _RETRY_S = 1.0, 4.0, 1.0, 0.3
_SAY_AFTER_S, _SAY_EVERY_S = 5.0, 60.0
_STORE_TIMEOUT = timedelta(seconds=5)
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no host has: the route to them is the default route."""
_MEANINGS = {
    "unresolved": "the name does not resolve here; use its address, or add it to /etc/hosts",
    "refused": "nothing listens there yet; run the same command there",
    "timed out": "no answer; is the host up, and does its firewall allow this port?",
    "no route": "no interface here has a route to it",
}


@dataclass(frozen=True)
class Point:
    """Location of the rendezvous."""

    endpoint: Endpoint
    epoch: int = 0
    """Epoch of the lease; 0 without one."""


@dataclass(frozen=True)
class Reached:
    """A rendezvous store that responds."""

    point: Point
    own_address: str
    """The address at which other hosts reach this one."""
    server: TCPStore | None
    """The store itself, if it runs on this host."""

    def connect(self) -> TCPStore:
        """A separate connection: calls on one store block each other."""
        host = "localhost" if self.server is not None else self.point.endpoint.host
        return TCPStore(host, self.point.endpoint.port, is_master=False, timeout=_STORE_TIMEOUT)


class Lease:
    """The files in RUN/.leader."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, float] = (0, 0.0)
        self._changed_s = time.monotonic()
        self._epoch = 0

    def newest(self) -> Point | None:
        """The current leader according to the folder."""
        epochs = sorted((int(path.stem[6:]) for path in self._folder.glob("epoch-*.json")), reverse=True)
        for epoch in epochs:
            with contextlib.suppress(OSError, ValueError, KeyError):  # not fully written yet, or just removed
                path = self._path(epoch)
                lease = json.loads(path.read_text(encoding="utf-8"))
                seen = (epoch, path.stat().st_mtime)
                if seen != self._seen:
                    self._seen, self._changed_s = seen, time.monotonic()
                return Point(Endpoint(lease["address"], lease["port"]), epoch)
        return None

    @property
    def unchanged_s(self) -> float:
        """Seconds since `newest` last saw the lease change."""
        return time.monotonic() - self._changed_s

    def take(self, address: str, port: int) -> Point | None:
        """Become the leader of the epoch after the last one seen; None if another host was faster."""
        epoch = self._seen[0] + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._path(epoch), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return None
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"host": socket.gethostname(), "address": address, "port": port}, file)
        self._epoch = epoch
        threading.Thread(target=self._keep, args=(epoch,), name="lease", daemon=True).start()
        return Point(Endpoint(address, port), epoch)

    def give_up(self) -> None:
        """Resign; the others need not wait until the lease expires."""
        if self._epoch:
            led, self._epoch = self._epoch, 0
            for epoch in range(1, led + 1):
                self._path(epoch).unlink(missing_ok=True)

    def _keep(self, epoch: int) -> None:
        while self._epoch == epoch:
            with contextlib.suppress(OSError):
                os.utime(self._path(epoch))  # needs no space, so a full disk does not depose the leader
            time.sleep(_TOUCH_S)

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch}.json"


class RendezvousPoint:
    """Finds the rendezvous store, or runs it."""

    def __init__(self, endpoint: str | None, lease: Lease | None, *, say: Callable[[str], None]) -> None:
        self._fixed = Point(Endpoint.parse(endpoint)) if endpoint else None
        self._lease = lease
        self._say = say
        self._say_at_s = time.monotonic() + _SAY_AFTER_S
        self._ours: tuple[Point, TCPStore] | None = None
        if endpoint is None and lease is None:
            raise ConfigError(
                "several hosts need a rendezvous",
                fix="set --rdzv_endpoint HOST:29400, or put --run_dir on a shared disk",
            )

    def reach(self) -> Reached:
        """Wait for a store that responds; run it here if it is this host's turn."""
        for _ in self._tries():
            point = self._lease.newest() if self._lease else None
            if self._ours is not None and (point is None or point.epoch <= self._ours[0].epoch):
                return Reached(self._ours[0], self._ours[0].endpoint.host, self._ours[1])
            if self._ours is not None:
                self.leave()  # another host took over
            if point is None and self._fixed is not None and not is_here(self._fixed.endpoint.host):
                point = self._fixed
            why = _why_silent(point.endpoint) if point is not None else ""
            if point is not None and not why:
                return Reached(point, _own_address(point.endpoint.host), None)
            if self._may_lead(point):
                self._lead()
            elif point is not None:
                self._now_and_then(f"waiting for the rendezvous at {point.endpoint} ({why})")
        raise AssertionError

    def superseded(self, point: Point) -> bool:
        """Whether a newer leader is known."""
        newest = self._lease.newest() if self._lease else None
        return newest is not None and newest.epoch > point.epoch

    def leave(self) -> None:
        """Shut down the store."""
        if self._ours is not None and self._lease is not None:
            self._lease.give_up()
        self._ours = None

    def _may_lead(self, point: Point | None) -> bool:
        if point is None or point is self._fixed:
            return point is None
        return self._lease is not None and self._lease.unchanged_s > _STALE_S

    def _lead(self) -> None:
        own = self._fixed.endpoint if self._fixed and is_here(self._fixed.endpoint.host) else None
        port = own.port if own else 0
        try:
            store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        except DistNetworkError:  # a process that is just exiting may still have the port
            where = f"the rendezvous port {port} on {socket.gethostname()}"
            self._now_and_then(f"{where} is in use{user_of(port)}; set another --rdzv_endpoint on all hosts")
            return
        address = _reachable(own.host) if own else _own_address()
        point = self._lease.take(address, store.port) if self._lease else Point(Endpoint(address, store.port))
        if point is not None:
            self._ours = point, store

    def _now_and_then(self, text: str) -> None:
        if time.monotonic() > self._say_at_s:
            self._say_at_s = time.monotonic() + _SAY_EVERY_S
            self._say(text)

    def _tries(self) -> Iterator[None]:
        while True:
            yield
            time.sleep(_RETRY_S)


def is_here(name: str) -> bool:
    """Whether a name refers to this host."""
    own = {address for interface in find_interfaces() for address in interface.addresses}
    return bool(own & set(resolve(name))) or name == socket.gethostname()


def _reachable(name: str) -> str:
    """The address of this host's name, unless only this host resolves it that way, like Debian's 127.0.1.1."""
    outward = [address for address in resolve(name) if not is_loopback(address) and not address.startswith("fe80:")]
    return min(outward, key=lambda address: ":" in address, default=name)  # prefer IPv4


def _why_silent(endpoint: Endpoint) -> str:
    """Why the rendezvous does not respond, with an explanation; empty if it does."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), timeout=_PROBE_S).close()
    except OSError as error:
        why = why_not(error)
        return f"{why}: {_MEANINGS[why]}" if why in _MEANINGS else why
    return ""


def _own_address(*towards: str) -> str:
    """The address at which others reach this host: the one it uses to reach them."""
    routes = (address_towards(host) for host in towards or _ANYWHERE)
    return next((address for address in routes if address), None) or _reachable(socket.gethostname())
