"""Which host runs the rendezvous: a fixed one, or the holder of a lease in a shared folder.

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
from pathlib import Path

from drumline.errors import ConfigError
from drumline.network import (
    SECRET,
    Endpoint,
    ForeignError,
    Line,
    WireError,
    address_towards,
    find_interfaces,
    is_loopback,
    resolve,
    user_of,
    why_not,
)
from drumline.rendezvous.membership import Membership
from drumline.rendezvous.server import RendezvousServer

_TOUCH_S, _STALE_S, _CONNECT_S, _ANSWER_S, _RETRY_S = 1.0, 4.0, 1.0, 4.0, 0.3
_SAY_AFTER_S, _SAY_EVERY_S = 5.0, 60.0
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
    """A connection to the rendezvous."""

    point: Point
    own_address: str
    """The address at which other hosts reach this one."""
    line: Line


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
    """Finds the rendezvous, or runs it."""

    def __init__(
        self,
        endpoint: str | None,
        lease: Lease | None,
        secret: bytes,
        *,
        hosts: tuple[int, int],
        say: Callable[[str], None],
    ) -> None:
        """hosts: the fewest and the most that take part; say: called with what a waiting user should know"""
        self._fixed = Point(Endpoint.parse(endpoint)) if endpoint else None
        self._lease = lease
        self.secret = secret
        self._fewest, self._most = hosts
        self._say = say
        self._say_at_s = time.monotonic() + _SAY_AFTER_S
        self._foreign_s: float | None = None
        self._ours: tuple[Point, RendezvousServer] | None = None
        if endpoint is None and lease is None:
            raise ConfigError(
                "several hosts need a rendezvous",
                fix="set --rdzv_endpoint HOST:29400, or put --run_dir on a shared disk",
            )

    def reach(self) -> Reached:
        """Wait for a rendezvous that answers; run it here if it is this host's turn."""
        for _ in self._tries():
            point = self._lease.newest() if self._lease else None
            if self._ours is not None and (point is None or point.epoch <= self._ours[0].epoch):
                own, server = self._ours
                line, _ = self._tried(Endpoint(server.address, server.port))
                if line is not None:
                    return Reached(own, own.endpoint.host, line)
                continue
            if self._ours is not None:
                self.leave()  # another host took over
            if point is None and self._fixed is not None and not is_here(self._fixed.endpoint.host):
                point = self._fixed
            line, why = self._tried(point.endpoint) if point is not None else (None, "")
            if point is not None and line is not None:
                return Reached(point, _own_address(point.endpoint.host), line)
            if self._may_lead(point):
                self._lead()
            elif point is not None:
                self._check_secret(point)
                self._now_and_then(f"waiting for the rendezvous at {point.endpoint} ({why})")
        raise AssertionError

    def superseded(self, point: Point) -> bool:
        """Whether a newer leader is known."""
        newest = self._lease.newest() if self._lease else None
        return newest is not None and newest.epoch > point.epoch

    def leave(self) -> None:
        """Shut down the server."""
        if self._ours is not None:
            if self._lease is not None:
                self._lease.give_up()
            self._ours[1].close()
        self._ours = None

    def _tried(self, at: Endpoint) -> tuple[Line | None, str]:
        """A connection, or why there is none, with an explanation."""
        foreign_s, self._foreign_s = self._foreign_s, None
        try:
            return Line.dial(at.host, at.port, self.secret, connect_s=_CONNECT_S, answer_s=_ANSWER_S), ""
        except OSError as error:
            why = why_not(error)
            return None, f"{why}: {_MEANINGS[why]}" if why in _MEANINGS else why
        except ForeignError:
            self._foreign_s = foreign_s or time.monotonic()
            return None, "it has another secret"
        except WireError:
            return None, "another program answers there; set another --rdzv_endpoint on all hosts"

    def _check_secret(self, point: Point) -> None:
        """ConfigError if the rendezvous has another secret, and is not just what listens at the end of an old lease."""
        patience_s = 2 * _STALE_S if point.epoch else 0.0
        if self._foreign_s is None or time.monotonic() - self._foreign_s < patience_s:
            return
        lacks = "another secret than" if self.secret else "a secret, unlike"
        raise ConfigError(
            f"the rendezvous at {point.endpoint} has {lacks} this host, {socket.gethostname()}",
            fix=f"set the same {SECRET} on every host; one can be made with: openssl rand -hex 32",
        )

    def _may_lead(self, point: Point | None) -> bool:
        if point is None or point is self._fixed:
            return point is None
        return self._lease is not None and self._lease.unchanged_s > _STALE_S

    def _lead(self) -> None:
        own = self._fixed.endpoint if self._fixed and is_here(self._fixed.endpoint.host) else None
        port = own.port if own else 0
        address = _reachable(own.host) if own else _own_address()
        listens = listens_at(own.host if own else address)
        try:
            server = RendezvousServer(listens, port, self.secret, Membership(fewest=self._fewest, most=self._most))
        except OSError:  # a process that is just exiting may still have the port
            where = f"the rendezvous port {port} on {socket.gethostname()}"
            self._now_and_then(f"{where} is in use{user_of(port)}; set another --rdzv_endpoint on all hosts")
            return
        point = self._lease.take(address, server.port) if self._lease else Point(Endpoint(address, server.port))
        if point is None:
            server.close()
        else:
            self._ours = point, server

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
    return bool(_own_addresses() & set(resolve(name))) or name == socket.gethostname()


def _own_addresses() -> set[str]:
    return {address for interface in find_interfaces() for address in interface.addresses}


def _reachable(name: str) -> str:
    """The address of this host's name, unless only this host resolves it that way, like Debian's 127.0.1.1."""
    return min(_outward(name), key=lambda address: ":" in address, default=name)  # prefer IPv4


def _outward(name: str) -> list[str]:
    return [address for address in resolve(name) if not is_loopback(address) and not address.startswith("fe80:")]


def listens_at(name: str) -> list[str]:
    """The addresses of this host that a name stands for; an empty one, for all, if only others know which."""
    wanted = resolve(name) if is_loopback(name) else _outward(name)
    return [address for address in wanted if address in _own_addresses()] or [""]


def _own_address(*towards: str) -> str:
    """The address at which others reach this host: the one it uses to reach them."""
    routes = (address_towards(host) for host in towards or _ANYWHERE)
    return next((address for address in routes if address), None) or _reachable(socket.gethostname())
