"""The rendezvous: supervisors of several hosts connect and agree which of them take part. Trivial for one host."""

from __future__ import annotations

import contextlib
import json
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from drumline.elastic.leader import Reached, RendezvousPoint
from drumline.network import free_port, within
from drumline.signals import in_background

Change = Literal["", "joined", "moved on", "left", "cut off"]

_RUN_ID = "drumline"
_LOOK_S, _SILENT_S, _DEAD_S, _GONE_S = 0.3, 4.0, 3.5, 2.5
_CAUSE_S, _ASK_S = 1.0, 0.1
_TIMEOUT = RendezvousTimeout(join=timedelta(days=365), last_call=timedelta(seconds=1))


@dataclass(frozen=True)
class Hosts:
    """Membership of an attempt, from the view of one host's supervisor."""

    number: int
    """This host's number, from 0."""
    ranks: tuple[int, ...]
    """Number of ranks by host."""
    master_addr: str
    master_port: int

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
        """Wait until all hosts needed for the next attempt have joined; RuntimeError if one leaves again.

        nproc: number of ranks on this host
        """
        port, self._port = self._port or free_port(), 0
        return Hosts(0, (nproc,), "localhost", port)

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


def _brief_delay(seconds: float | tuple[float, float]) -> None:
    time.sleep(_ASK_S)


# torch's rendezvous polls once a second and caches the result for another, and no setting changes that: this patch,
# and the one of the cache below, are most of what makes a restart fast. Hundreds of hosts can poll more often.
dynamic_rendezvous._delay = _brief_delay  # type: ignore[attr-defined]


class HostsRendezvous(Rendezvous):
    """Several hosts, through torch's rendezvous. Every call to the store runs in a thread that can be abandoned:
    a silent connection would block it for minutes."""

    def __init__(self, point: RendezvousPoint, *, fewest: int, most: int) -> None:
        super().__init__()
        self.elastic = fewest < most
        self._point = point
        self._fewest, self._most = fewest, most
        self.run_id = _RUN_ID
        self._reached: Reached | None = None
        self._handler: DynamicRendezvousHandler | None = None
        self._look: _Look | None = None
        self._info: RendezvousInfo | None = None

    def join(self, nproc: int) -> Hosts:
        info = self._next()
        at = info.bootstrap_store_info
        assert at is not None
        info.store.set(f"ranks/{info.rank}", str(nproc))
        ranks = info.store.multi_get([f"ranks/{number}" for number in range(info.world_size)])  # blocks until all exist
        return Hosts(info.rank, tuple(map(int, ranks)), at.master_addr, at.master_port)

    def _next(self) -> RendezvousInfo:
        self._info = None
        while True:
            if self._handler is None or self._look is None or self._look.is_silent:
                self._connect()
            assert self._handler is not None and self._look is not None
            joining = in_background(self._handler.next_rendezvous)
            while not joining.done() and not self._look.is_silent:
                wait([joining], 0.05)
            if joining.done() and joining.exception() is None:
                self._info = joining.result()
                self._look.begin(frozenset(self._handler._state_holder.state.participants))
                return self._info
            self.forget()

    def _connect(self) -> None:
        self.forget()
        self._reached = self._point.reach()
        with contextlib.suppress(RuntimeError):  # lost again: the next check will notice
            store = self._reached.connect()
            self._handler = DynamicRendezvousHandler.from_backend(
                _RUN_ID,
                store,
                C10dRendezvousBackend(store, _RUN_ID),
                self._fewest,
                self._most,
                local_addr=self._reached.own_address,
                timeout=_TIMEOUT,
                keep_alive_interval=1,
                keep_alive_max_attempt=3,
            )
            cast(Any, self._handler)._state_holder._cache_duration = 0
        self._look = _Look(self._reached, self._point)

    def change(self) -> Change:
        assert self._look is not None
        return self._look.change()

    def share(self, cause: dict[str, Any]) -> None:
        if self._info is not None:
            store = self._info.store
            with contextlib.suppress(Exception):
                within(_CAUSE_S, lambda: store.set("cause", json.dumps(cause)))

    def shared(self, *, wait: bool) -> dict[str, Any] | None:
        if self._info is None:
            return None
        store = self._info.store

        def ask() -> dict[str, Any] | None:
            if wait:
                store.wait(["cause"], timedelta(seconds=_CAUSE_S))
            return json.loads(store.get("cause")) if store.check(["cause"]) else None

        with contextlib.suppress(Exception):
            return within(2 * _CAUSE_S, ask)
        return None

    def forget(self) -> None:
        if self._look is not None:
            self._look.ended.set()
        self._handler = self._look = None

    def leave(self, *, finished: bool, hurry: Callable[[], bool] = lambda: False) -> None:
        look, info = self._look, self._info
        if finished and look is not None and info is not None:
            with contextlib.suppress(RuntimeError):
                info.store.set(f"finished/{info.rank}", "")
                # A host that is done waits for the others' final plot or upload: to them, a host that left has died.
                while look.change() in ("", "joined") and not hurry():
                    if info.store.check([f"finished/{rank}" for rank in range(info.world_size)]):
                        break
                    time.sleep(0.1)
        self._info = None
        self.forget()
        self._point.leave()


class _Look:
    """A thread with its own connection that polls the membership."""

    def __init__(self, reached: Reached, point: RendezvousPoint) -> None:
        self._reached, self._point = reached, point
        self.ended = threading.Event()
        self._lock = threading.Lock()
        self._heard_s = time.monotonic()
        self._broken = self._superseded = False
        self._state: Any = None
        self._members: frozenset[Any] = frozenset()
        self._beats: dict[Any, tuple[Any, float]] = {}
        threading.Thread(target=self._keep_looking, name="hosts", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether the store is unreachable, or no longer the current one."""
        return self._broken or self._superseded or time.monotonic() - self._heard_s > _SILENT_S

    def begin(self, members: frozenset[Any]) -> None:
        """Report changes relative to these hosts from now on."""
        with self._lock:
            self._state, self._members, self._beats = None, members, {}

    def change(self) -> Change:
        if self.is_silent:
            return "cut off"
        with self._lock:
            now_s = self._heard_s  # later changes are unknown
            if any(now_s - since_s > (_GONE_S if beat is None else _DEAD_S) for beat, since_s in self._beats.values()):
                return "left"
            if self._state is None:
                return ""
            missing = self._members - set(self._state.participants)
            if missing:
                return "moved on" if missing <= self._state.wait_list else ""
            return "joined" if self._state.wait_list else ""

    def _keep_looking(self) -> None:
        try:
            backend = C10dRendezvousBackend(self._reached.connect(), _RUN_ID)
            while not self.ended.wait(_LOOK_S):
                answer = backend.get_state()
                self._superseded = self._point.superseded(self._reached.point)
                self._see(pickle.loads(answer[0]) if answer else None)
        except Exception:
            self._broken = True

    def _see(self, state: Any) -> None:
        with self._lock:
            self._heard_s = now_s = time.monotonic()
            self._state = state
            for node in self._members if state is not None else ():
                # A host is alive if its heartbeat changes, whatever its clock says; one that is no longer listed counts
                # from its last change.
                beat = state.last_heartbeats.get(node)
                before, since_s = self._beats.get(node, (None, now_s))
                self._beats[node] = (beat, since_s if beat is None or beat == before else now_s)
