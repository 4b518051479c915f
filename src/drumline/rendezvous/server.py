"""The server of a rendezvous: a thread that hears the hosts of a run, keeps their membership and tells them of it.

Anyone may connect. Who does not show within seconds that he knows the run's secret is ignored and named, and costs
next to nothing meanwhile: few such connections are kept, few bytes of each, and one address cannot crowd out others.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from drumline.network import Channel, WireError, listener
from drumline.rendezvous.membership import Membership

TICK_S, DEAD_S = 0.1, 3.5
"""How often the time is looked at; and after how long without a word a host counts as gone."""
_STRANGERS, _INTRODUCTION_S = 64, 10.0
"""How many connections may be open that have not shown that they know the secret, and for how long."""
_CHUNK_BYTES, _UNREAD_BYTES = 1 << 16, 8 << 20
_LAST_WORDS_S = 1.0
_NAMED, _NAME_EVERY_S = 16, 60.0


@dataclass
class _Connection:
    socket: socket.socket
    number: int
    channel: Channel
    peer: str
    since_s: float
    heard_s: float
    told: object = None
    """The view that was sent last."""


class RendezvousServer:
    """Listens on some addresses of this host until it is closed. OSError if it cannot."""

    def __init__(self, addresses: Sequence[str], port: int, secret: bytes, membership: Membership) -> None:
        """addresses: an empty one stands for all; port: 0 for any"""
        self._secret, self._membership = secret, membership
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._count = 0
        self._strangers = _Strangers()
        self._ends = threading.Event()
        self._version = -1
        self._listeners: list[socket.socket] = []
        try:
            for address in addresses:
                self._listeners.append(listener(address, port))
                port = port or self._listeners[0].getsockname()[1]
        except OSError:
            for each in self._listeners:
                each.close()
            raise
        self.address, self.port = addresses[0] or "127.0.0.1", port
        """Where this host itself connects."""
        for each in self._listeners:
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell what is left to tell, and close all connections."""
        self._ends.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._ends.is_set():
            self._turn(TICK_S)
        until_s = time.monotonic() + _LAST_WORDS_S
        while any(each.channel.output for each in self._known()) and time.monotonic() < until_s:
            self._turn(TICK_S)
        for each in (*self._listeners, *(known.socket for known in self._connections.values())):
            each.close()
        self._selector.close()

    def _turn(self, wait_s: float) -> None:
        for key, events in self._selector.select(wait_s):
            if key.data is None:
                with contextlib.suppress(OSError):
                    self._accept(key.fileobj)  # type: ignore[arg-type]
            elif key.data.number in self._connections:
                self._attend(key.data, events)
        now_s = time.monotonic()
        self._drop_the_silent(now_s)
        self._membership.advance(now_s)
        if self._version != self._membership.version:
            self._version = self._membership.version
            for each in self._known():
                self._tell(each)

    def _known(self) -> list[_Connection]:
        return [each for each in self._connections.values() if each.channel.is_trusted]

    def _accept(self, listening: socket.socket) -> None:
        accepted, peer = listening.accept()
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._count += 1
        now_s = time.monotonic()
        channel = Channel(self._secret, serves=True)
        new = _Connection(accepted, self._count, channel, _plain(peer[0]), now_s, now_s)
        self._connections[new.number] = new
        self._selector.register(accepted, selectors.EVENT_READ, new)
        unknown = [each for each in self._connections.values() if not each.channel.is_trusted]
        if len(unknown) > _STRANGERS:
            ((crowd, _),) = Counter(each.peer for each in unknown).most_common(1)
            self._drop(next(each for each in unknown if each.peer == crowd), stranger=True)

    def _attend(self, each: _Connection, events: int) -> None:
        was_trusted = each.channel.is_trusted
        try:
            if events & selectors.EVENT_READ:
                received = each.socket.recv(_CHUNK_BYTES)
                if not received:
                    raise ConnectionResetError("it closed the connection")
                self._hear(each, received)
            self._send(each)
        except WireError:
            self._drop(each, stranger=not was_trusted)
        except BlockingIOError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self._drop(each)

    def _hear(self, each: _Connection, received: bytes) -> None:
        was_trusted = each.channel.is_trusted
        messages = each.channel.feed(received)
        if each.channel.is_trusted and not was_trusted:
            here = _plain(each.socket.getsockname()[0])
            self._membership.arrive(each.number, "" if here == each.peer else here)
        if messages:
            each.heard_s = time.monotonic()
        for message in messages:
            if message["say"] == "beat":
                each.channel.write({"beat": True})
            else:
                self._membership.hear(each.number, message, each.heard_s)

    def _tell(self, each: _Connection) -> None:
        view = self._membership.view(each.number)
        if view != each.told:
            each.told = view
            try:
                each.channel.write(view)
                self._send(each)
            except (OSError, ValueError):
                self._drop(each)

    def _send(self, each: _Connection) -> None:
        output = each.channel.output
        with contextlib.suppress(BlockingIOError):
            while output:
                del output[: each.socket.send(output)]
        if len(output) > _UNREAD_BYTES:
            raise ConnectionAbortedError("it reads nothing")
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if output else 0)
        if self._selector.get_key(each.socket).events != wanted:
            self._selector.modify(each.socket, wanted, each)

    def _drop_the_silent(self, now_s: float) -> None:
        for each in list(self._connections.values()):
            if each.channel.is_trusted and now_s - each.heard_s > DEAD_S:
                self._drop(each)
            elif not each.channel.is_trusted and now_s - each.since_s > _INTRODUCTION_S:
                self._drop(each, stranger=True)

    def _drop(self, each: _Connection, *, stranger: bool = False) -> None:
        if stranger:
            self._strangers.note(each.peer)
        del self._connections[each.number]
        self._selector.unregister(each.socket)
        each.socket.close()
        self._membership.lose(each.number, time.monotonic())


class _Strangers:
    """Those who connected without the run's secret. Each is named once, and their number now and then."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._said_s = time.monotonic()

    def note(self, address: str) -> None:
        known = address if address in self._counts or len(self._counts) < _NAMED else "other addresses"
        self._counts[known] += 1
        now_s = time.monotonic()
        if self._counts[known] == 1 or now_s - self._said_s > _NAME_EVERY_S:
            self._said_s = now_s
            times = f" ({self._counts[known]:,} times)" if self._counts[known] > 1 else ""
            logging.getLogger(__name__).warning(
                "someone at %s spoke to the rendezvous without the run's secret%s: ignored", known, times
            )


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]
