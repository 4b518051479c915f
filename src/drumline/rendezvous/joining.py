"""The rendezvous: supervisors of several hosts connect and agree which of them take part. Trivial for one host."""

from __future__ import annotations

import select
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from drumline.network import WireError, derived, free_port
from drumline.rendezvous.leader import Reached, RendezvousPoint

Change = Literal["", "joined", "moved on", "left", "cut off"]

_RUN_ID = "drumline"
_BEAT_S, _SILENT_S, _LOOK_S = 0.5, 4.0, 0.3
_CAUSE_S, _POLL_S = 1.0, 0.1
_LONGEST_TRACE = 1 << 17


@dataclass(frozen=True)
class Hosts:
    """Membership of an attempt, from the view of one host's supervisor."""

    number: int
    """This host's number, from 0."""
    ranks: tuple[int, ...]
    """Number of ranks by host."""
    master_addr: str
    master_port: int
    key: str = field(default="", repr=False)
    """With which the ranks of this attempt sign what they tell each other; empty: they do not."""

    @property
    def first_rank(self) -> int:
        """First global rank of this host."""
        return sum(self.ranks[: self.number])


class Rendezvous:
    """A single host. Its ranks use a new port in each attempt, reachable only from this machine."""

    elastic = False
    """Whether the run continues if one of its hosts stops."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self.run_id = uuid.uuid4().hex

    def join(self, nproc: int) -> Hosts:
        """Wait until all hosts needed for the next attempt have joined.

        nproc: number of ranks on this host
        """
        port, self._port = self._port or free_port(), 0
        return Hosts(0, (nproc,), "127.0.0.1", port)

    def change(self) -> Change:
        """What happened to the hosts since the rendezvous; returns immediately."""
        return ""

    def forget(self) -> None:
        """Start a new rendezvous: the last one did not work."""

    def share(self, cause: dict[str, Any]) -> None:
        """Tell the other hosts why this attempt failed."""

    def shared(self, *, wait: bool) -> dict[str, Any] | None:
        """The cause reported by another host; `wait`: give it a moment to report."""
        return None

    def leave(self, *, finished: bool, hurry: Callable[[], bool] = lambda: False) -> None:
        """Leave. A host whose ranks have finished waits for the other hosts to finish, unless in a hurry."""


class HostsRendezvous(Rendezvous):
    """Several hosts, through the server that one of them runs. It decides; this end asks, and is told."""

    def __init__(self, point: RendezvousPoint, *, elastic: bool) -> None:
        super().__init__()
        self.elastic = elastic
        self._point = point
        self._node = self.run_id
        self.run_id = _RUN_ID
        self._turns = 0
        self._link: _Link | None = None

    def join(self, nproc: int) -> Hosts:
        while True:
            link = self._connected()
            self._turns += 1
            link.say("join", node=self._node, turn=self._turns, ranks=nproc, address=link.own_address)
            view = self._seat(link)
            if view is not None:
                key = derived(self._point.secret, f"ranks of {view['token']}")
                return Hosts(view["number"], tuple(view["ranks"]), view["address"], view["port"], key)

    def _seat(self, link: _Link) -> dict[str, Any] | None:
        """This host's view of the attempt that it takes part in; None to ask again."""
        offered = ""
        while not link.is_silent:
            view = link.view
            if view["turn"] == self._turns and "number" in view:
                if view["change"] in ("left", "moved on"):
                    return None
                if view["port"]:
                    return view
                if view["number"] == 0 and offered != view["token"]:
                    offered = view["token"]
                    link.say("port", port=free_port(), token=offered)
            link.wait(_POLL_S)
        return None

    def _connected(self) -> _Link:
        if self._link is None or self._link.is_silent:
            self.forget()
            self._link = _Link(self._point.reach(), self._point)
        return self._link

    def change(self) -> Change:
        if self._link is None or self._link.is_silent:
            return "cut off"
        return cast(Change, self._link.view.get("change", ""))

    def share(self, cause: dict[str, Any]) -> None:
        if self._link is not None:
            # The stacks of hundreds of threads may be longer than what is read of a message.
            self._link.say("cause", cause={**cause, "trace": cause["trace"][-_LONGEST_TRACE:]})

    def shared(self, *, wait: bool) -> dict[str, Any] | None:
        link, until_s = self._link, time.monotonic() + _CAUSE_S
        while link is not None:
            view = link.view
            if view.get("cause") or not wait or view.get("alone") or link.is_silent or time.monotonic() > until_s:
                return view.get("cause")  # who has left the attempt has told before
            link.wait(_POLL_S)
        return None

    def forget(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

    def leave(self, *, finished: bool, hurry: Callable[[], bool] = lambda: False) -> None:
        if finished and (link := self._link) is not None:
            link.say("finished")
            # A host that is done waits for the others' final plot or upload: to them, a host that left has died.
            while self.change() in ("", "joined") and not link.view.get("finished") and not hurry():
                link.wait(_POLL_S)
        self.forget()
        self._point.leave()


class _Link:
    """The connection to the rendezvous, with threads that read from it, show that this host is alive, and find out
    whether another host has taken over."""

    def __init__(self, reached: Reached, point: RendezvousPoint) -> None:
        self.own_address = reached.own_address
        self.view: dict[str, Any] = {"turn": 0}
        """What the server told last."""
        self._line, self._at, self._point = reached.line, reached.point, point
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._superseded = False
        self._heard_s = time.monotonic()
        for work in (self._listen, self._watch_the_lease):
            threading.Thread(target=work, name="hosts", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether the server does not answer, or is no longer the current one."""
        return self._ended.is_set() or self._superseded or time.monotonic() - self._heard_s > _SILENT_S

    def say(self, what: str, **more: Any) -> None:
        """Tell the server something; if that fails, the connection ends."""
        try:
            with self._sending:
                self._line.send({"say": what, **more})
        except (OSError, ValueError):
            self.close()

    def wait(self, seconds: float) -> None:
        """Until the server tells something new, but no longer than this."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        self._ended.set()
        self._line.close()

    def _listen(self) -> None:
        beat_s = 0.0
        poll = select.poll()
        try:
            poll.register(self._line, select.POLLIN)
            while not self._ended.is_set():
                if time.monotonic() - beat_s > _BEAT_S:
                    beat_s = time.monotonic()
                    self.say("beat")
                if not poll.poll(1000 * _POLL_S):
                    continue
                messages = self._line.receive()
                self._heard_s = time.monotonic()
                for message in messages:
                    if "turn" in message:
                        with self._changed:
                            self.view = message
                            self._changed.notify_all()
        except (OSError, ValueError, WireError):
            self.close()
        with self._changed:
            self._changed.notify_all()

    def _watch_the_lease(self) -> None:
        while not self._superseded and not self._ended.wait(_LOOK_S):
            self._superseded = self._point.superseded(self._at)
