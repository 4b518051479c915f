"""Plain sockets between two hosts: connections, round-trip time, bandwidth, packet size.

Independent of torch. One side runs a ProbeServer, which answers clients that know its token: it tells the time and
counts bytes and the lengths of datagrams, nothing else. The other side probes. Only the path from the client to the
server is measured, so that a fault in one direction is attributed to one host.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from drumline.network.background import within

Why = Literal["", "unresolved", "refused", "timed out", "no route", "unreachable", "forbidden", "silent"]
"""Why a connection cannot be opened; empty: it can."""

TRANSFER_BYTES = 4 << 20
_TOKEN_BYTES, _PINGS, _CONNECTIONS, _TOKEN_S, _SERVER_S = 16, 8, 64, 3.0, 15.0
_NAME_S = 5.0
_MOST_BYTES = 64 << 20
_STALLED_BYTES = 64 << 10
_TIME, _LENGTH = struct.Struct("!d"), struct.Struct("!I")
_DATAGRAM_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
_SMALLEST_PACKET, _RUNGS = 576, 32
# Linux constants that Python lacks. "Probe" sets don't-fragment and ignores the cached path MTU.
_DO_NOT_FRAGMENT = {socket.AF_INET: (socket.IPPROTO_IP, 10, 3), socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 3)}
# Offsets in Linux's tcp_info, which ends after the first three on old kernels.
_ACKED, _RETRANSMITTED, _SEGMENTS, _LEAST_INFO_BYTES, _DUPLICATES, _INFO_BYTES = 120, 100, 156, 160, 216, 220


@dataclass(frozen=True)
class Ping:
    """The fastest of several round trips."""

    rtt_s: float
    skew_s: float
    """The other clock minus this one, accurate to half the round trip."""


@dataclass(frozen=True)
class Transfer:
    """What happened to bytes that were sent in one direction at full speed."""

    bytes: int
    seconds: float
    stalled: bool
    """Almost nothing arrived, although the connection was open."""
    segments: int = 0
    retransmitted: int = 0
    """Of those segments; both are 0 if the system does not report them."""


class ProbeServer:
    """Answers probes on addresses of this machine until it is closed."""

    def __init__(self, addresses: Iterable[str], *, clock: Callable[[], float] = time.time) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.ports: dict[str, tuple[int, int]] = {}
        """By address, if it could be bound: the TCP and the UDP port."""
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._closed = False
        for address in addresses:
            self._listen(address)
        if self.ports:
            threading.Thread(target=self._serve, name="probe", daemon=True).start()

    def __enter__(self) -> ProbeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True

    def _listen(self, address: str) -> None:
        family = _family(address)
        listener, datagrams = socket.socket(family, socket.SOCK_STREAM), socket.socket(family, socket.SOCK_DGRAM)
        try:
            for each in (listener, datagrams):
                each.bind((address, 0))
                each.setblocking(False)
            listener.listen(_CONNECTIONS)
        except OSError:  # the interface just lost this address
            listener.close()
            datagrams.close()
            return
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(datagrams, selectors.EVENT_READ, self._acknowledge)
        self.ports[address] = listener.getsockname()[1], datagrams.getsockname()[1]

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.2):
                with contextlib.suppress(OSError):
                    key.data(key.fileobj)
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        if not self._free.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._answer, args=(connection,), name="probe", daemon=True).start()

    def _acknowledge(self, datagrams: socket.socket) -> None:
        received, sender = datagrams.recvfrom(1 << 16)
        if hmac.compare_digest(received[:_TOKEN_BYTES], self.token.encode()):
            datagrams.sendto(_LENGTH.pack(len(received)), sender)

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), self._released(), connection:
            connection.settimeout(_TOKEN_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = _receive(connection, _TOKEN_BYTES + 1)
            if not hmac.compare_digest(asked[:_TOKEN_BYTES], self.token.encode()):
                return
            connection.settimeout(_SERVER_S)
            if asked[_TOKEN_BYTES:] == b"P":
                for _ in range(_PINGS):
                    _receive(connection, 1)
                    connection.sendall(_TIME.pack(self._clock()))
            elif asked[_TOKEN_BYTES:] == b"U":
                count = 0
                while count < _MOST_BYTES and (block := connection.recv(1 << 18)):
                    count += len(block)
                connection.sendall(_LENGTH.pack(count))

    @contextlib.contextmanager
    def _released(self) -> Any:
        try:
            yield
        finally:
            self._free.release()


def resolve(name: str) -> list[str]:
    """The addresses that a name resolves to here; empty if it does not resolve in time."""
    try:
        answers = within(_NAME_S, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return []
    return list(dict.fromkeys(str(where[0]) for *_, where in answers))


def user_of(port: int) -> str:
    """The program that listens on a port, if this user may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid not in (None, os.getpid()):
                return f" by {psutil.Process(each.pid).name()} (process {each.pid})"
    return ""


def why_not(error: OSError) -> Why:
    """Why a connection could not be opened."""
    if isinstance(error, socket.gaierror):
        return "unresolved"
    if isinstance(error, TimeoutError):
        return "timed out"
    known: dict[int | None, Why] = {
        errno.ECONNREFUSED: "refused",
        errno.ENETUNREACH: "no route",
        errno.EHOSTUNREACH: "unreachable",
        errno.EPERM: "forbidden",
        errno.EACCES: "forbidden",
    }
    return known.get(error.errno, "silent")


def ping(address: str, port: int, token: str, *, within_s: float, clock: Callable[[], float] = time.time) -> Ping:
    """Connect and time a few one-byte round trips; raises OSError if that fails."""
    with _asking(address, port, token, b"P", within_s=within_s) as connection:
        trips, until = list[Ping](), time.monotonic() + within_s
        while not trips or (len(trips) < _PINGS and time.monotonic() < until):
            since, sent_at = time.perf_counter(), clock()
            connection.sendall(b"?")
            (their_time,) = _TIME.unpack(_receive(connection, _TIME.size))
            rtt_s = time.perf_counter() - since
            trips.append(Ping(rtt_s, their_time - (sent_at + rtt_s / 2)))
    return min(trips, key=lambda trip: trip.rtt_s)


def transfer(address: str, port: int, token: str, *, within_s: float) -> Transfer:
    """Send a few megabytes at full speed, within a time limit; raises OSError if it cannot connect."""
    with _asking(address, port, token, b"U", within_s=within_s) as connection:
        since, sent, block = time.perf_counter(), 0, bytes(1 << 16)
        connection.settimeout(0.1)
        while sent < TRANSFER_BYTES and time.perf_counter() - since < within_s / 2:
            with contextlib.suppress(TimeoutError):
                sent += connection.send(block)
        connection.settimeout(max(0.1, within_s - (time.perf_counter() - since)))
        arrived = None
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            (arrived,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
        seconds = time.perf_counter() - since
        acked, segments, retransmitted = _sent_so_far(connection)
    count = arrived if arrived is not None else acked
    return Transfer(count, seconds, arrived is None and count < _STALLED_BYTES, segments, retransmitted)


def largest_packet(address: str, port: int, token: str, *, mtu: int, rtt_s: float = 0.0) -> int:
    """The largest packet up to `mtu` that arrives; 0 if datagrams are not answered or cannot be sent."""
    family = _family(address)
    if not sys.platform.startswith("linux"):
        return 0
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.setsockopt(*_DO_NOT_FRAGMENT[family])
        datagrams.connect((address, port))
        headers, patience_s = _DATAGRAM_HEADERS[family], 0.2 + 4 * rtt_s
        low, high = 0, mtu - headers
        sizes: Sequence[int] = (_SMALLEST_PACKET - headers, high)
        while sizes:
            arrived = _arrived(datagrams, token, sizes, patience_s=patience_s)
            if not arrived:
                high = min(sizes)
                if not low:
                    return 0
            else:
                low = max(arrived)
                high = min((size for size in sizes if size > low), default=low)
            step = max(1, (high - low) // _RUNGS)
            sizes = range(low + step, high, step)
        return low + headers


def _arrived(datagrams: socket.socket, token: str, sizes: Sequence[int], *, patience_s: float) -> set[int]:
    """Which of these lengths arrive; each is tried several times, so that random loss is not mistaken for a limit."""
    arrived: set[int] = set()
    for _ in range(4):
        for size in sizes:
            if size not in arrived:
                with contextlib.suppress(OSError):  # larger than this machine can send
                    datagrams.send(token.encode().ljust(size, b"\0"))
        until = time.monotonic() + patience_s
        while len(arrived) < len(sizes) and (left_s := until - time.monotonic()) > 0:
            datagrams.settimeout(left_s)
            with contextlib.suppress(OSError, struct.error):
                arrived |= {_LENGTH.unpack(datagrams.recv(64))[0]} & set(sizes)
    return arrived


def _asking(address: str, port: int, token: str, what: bytes, *, within_s: float) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=within_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token.encode() + what)
    return connection


def _sent_so_far(connection: socket.socket) -> tuple[int, int, int]:
    """Bytes acknowledged, segments sent, and segments retransmitted; zeros if the system does not report them.

    Spurious retransmissions, as when the other side is too busy to acknowledge in time, are not counted.
    """
    if not sys.platform.startswith("linux"):
        return 0, 0, 0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _LEAST_INFO_BYTES:
        return 0, 0, 0
    acked = struct.unpack_from("@Q", info, _ACKED)[0]
    segments, again = (struct.unpack_from("@I", info, at)[0] for at in (_SEGMENTS, _RETRANSMITTED))
    in_vain = struct.unpack_from("@I", info, _DUPLICATES)[0] if len(info) >= _INFO_BYTES else 0
    return acked, segments, max(0, again - in_vain)


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        block = connection.recv(count - len(received))
        if not block:
            raise ConnectionResetError("the other side closed the connection")
        received += block
    return received


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
