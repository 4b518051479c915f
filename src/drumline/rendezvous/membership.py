"""Which hosts take part in an attempt, and what happened to them since: the state that a rendezvous server keeps.

Hosts that ask to join wait. Once no attempt is running and enough of them wait, they become the hosts of the next one,
numbered by address. An attempt is over when none of its hosts is in it any more: each has asked to join the next one,
or is gone. What a host is told is its `view`; a host compares nothing itself. No sockets and no clock here.
"""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Any

LAST_CALL_S, GONE_S = 1.0, 2.5
"""How long to wait for more hosts once there are enough; and how long after a host is gone the others are told so:
before that, their ranks may notice it themselves, or be saving."""


@dataclass
class _Host:
    """A host that asked to join."""

    node: str
    """Identifies it across connections."""
    turn: int
    """How often it asked; its view names the request that it answers."""
    ranks: int
    address: str

    @property
    def order(self) -> tuple[int, int, str, str]:
        try:
            number = ipaddress.ip_address(self.address)
        except ValueError:
            return 9, 0, self.address, self.node
        return number.version, int(number), "", self.node


@dataclass
class _Attempt:
    """The hosts of an attempt, by number, and what became of them. Hosts are named by their connections."""

    hosts: list[int]
    ranks: list[int]
    address: str
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Differs between attempts."""
    port: int | None = None
    present: set[int] = field(default_factory=set)
    gone_s: dict[int, float] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    left: bool = False
    cause: dict[str, Any] | None = None


class Membership:
    """All hosts of a run."""

    def __init__(self, *, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most
        self._hosts: dict[int, _Host] = {}
        self._outward: dict[int, str] = {}
        self._waiting: list[int] = []
        self._attempt: _Attempt | None = None
        self._call_until_s: float | None = None
        self.version = 0
        """Changes whenever a view may have."""

    def arrive(self, connection: int, outward: str) -> None:
        """outward: the address of the server's host at which this one reached it; empty: it is on that host"""
        self._outward[connection] = outward

    def hear(self, connection: int, message: dict[str, Any], now_s: float) -> None:
        """A host's message; KeyError, TypeError or ValueError if it is none."""
        attempt = self._attempt if self._attempt and connection in self._attempt.present else None
        match message["say"]:
            case "join":
                host = _Host(str(message["node"]), int(message["turn"]), int(message["ranks"]), str(message["address"]))
                self._join(connection, host, now_s)
            case "port" if attempt and attempt.hosts[0] == connection and message["token"] == attempt.token:
                attempt.port = int(message["port"])
            case "cause" if attempt and attempt.cause is None:
                attempt.cause = dict(message["cause"])
            case "finished" if attempt:
                attempt.finished.add(connection)
            case _:
                return
        self.version += 1
        self.advance(now_s)

    def _join(self, connection: int, host: _Host, now_s: float) -> None:
        for other in [each for each, known in self._hosts.items() if known.node == host.node and each != connection]:
            self.lose(other, now_s)  # it has a new connection
        self._hosts[connection] = host
        if self._attempt is not None:
            self._attempt.present.discard(connection)
        if connection not in self._waiting:
            self._waiting.append(connection)

    def lose(self, connection: int, now_s: float) -> None:
        """A host has left, or is not heard any more."""
        self._outward.pop(connection, None)
        if self._hosts.pop(connection, None) is None:
            return
        if connection in self._waiting:
            self._waiting.remove(connection)
        if (attempt := self._attempt) is not None and connection in attempt.hosts:
            attempt.present.discard(connection)
            if connection not in attempt.finished:
                attempt.gone_s[connection] = now_s
        self.version += 1
        self.advance(now_s)

    def advance(self, now_s: float) -> None:
        """Do what is due by now."""
        attempt = self._attempt
        if attempt is not None and not attempt.present:
            self._attempt = attempt = None
        if attempt is not None:
            if not attempt.left and any(now_s - since_s > GONE_S for since_s in attempt.gone_s.values()):
                attempt.left = True
                self.version += 1
            return
        if len(self._waiting) < self._fewest:
            self._call_until_s = None
            return
        if self._call_until_s is None:
            self._call_until_s = now_s + LAST_CALL_S
        if len(self._waiting) >= self._most or now_s >= self._call_until_s:
            self._begin()

    def _begin(self) -> None:
        taken = self._waiting[: self._most]
        outward = next(filter(None, (self._outward.get(each) for each in taken)), "")
        for connection in taken:
            if outward and not self._outward.get(connection):
                # The host of the server may not know by which of its addresses the others reach it.
                self._hosts[connection].address = outward
        taken.sort(key=lambda connection: self._hosts[connection].order)
        ranks = [self._hosts[connection].ranks for connection in taken]
        address = self._hosts[taken[0]].address if len(taken) > 1 else "127.0.0.1"
        self._attempt = _Attempt(taken, ranks, address, present=set(taken))
        self._waiting = [each for each in self._waiting if each not in taken]
        self._call_until_s = None
        self.version += 1

    def view(self, connection: int) -> dict[str, Any]:
        """What a host has to know."""
        host, attempt = self._hosts.get(connection), self._attempt
        view: dict[str, Any] = {"turn": host.turn if host else 0}
        if attempt is None or connection not in attempt.present:
            return view
        return view | {
            "number": attempt.hosts.index(connection),
            "ranks": attempt.ranks,
            "address": attempt.address,
            "port": attempt.port,
            "token": attempt.token,
            "change": self._change(attempt),
            "cause": attempt.cause,
            "alone": attempt.present == {connection},
            "finished": attempt.finished.issuperset(attempt.hosts),
        }

    def _change(self, attempt: _Attempt) -> str:
        if attempt.left:
            return "left"
        missing = set(attempt.hosts) - attempt.present - attempt.finished
        if missing:
            return "moved on" if missing <= set(self._waiting) else ""
        return "joined" if self._waiting and len(attempt.hosts) < self._most else ""
