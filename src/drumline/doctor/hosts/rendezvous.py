"""How hosts that check each other connect, and why they cannot: names, ports, other programs.

They share a torch store, like the ranks of a run. Before that, plain sockets find out what is wrong with the path to
it. Messages are split into pieces that fit in any packet: where large packets are dropped, the store must still work,
to report that.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from drumline.doctor.finding import Finding
from drumline.errors import ConfigError
from drumline.network import (
    SECRET,
    Endpoint,
    Why,
    find_interfaces,
    listener,
    resolve,
    signed,
    user_of,
    verified,
    why_not,
    within,
)
from drumline.parallel import find_place, slurm_hosts
from drumline.rendezvous import is_here, listens_at

T = TypeVar("T")

_PIECE_BYTES = 300
_ANSWER_S, _CONNECT_S, _RETRY_S, _LOOK_S, _SAY_S = 15.0, 3.0, 0.3, 0.05, 5.0


class CheckEndedError(Exception):
    """A check that cannot continue, and the finding that says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where and how hosts connect, from the view of one of them."""

    address: str
    port: int
    hosts: int
    """Number of hosts expected."""
    keeps: bool
    """Whether this host runs the store."""
    leads: bool
    """Whether this host, the first one, collects, judges and reports."""
    number: int | None = None
    """This host's number; None: numbered in order of arrival."""
    spare: bool = False
    """Whether another rank on this host takes part for it."""
    names: tuple[str, ...] = ()
    """Names of all hosts, by number, if the launcher gave them."""
    slurm: bool = False
    """Whether srun started this process."""
    task: str = "check"
    """What they connect for, as used in messages."""
    attempt: str = "0"
    """Keeps attempts apart in a store that outlives them."""

    @property
    def where(self) -> str:
        return str(Endpoint(self.address, self.port))

    def moved(self, address: str, port: int) -> str:
        """The command that uses another endpoint."""
        if self.number is None:
            return replace(self, address=address, port=port).again
        return f"on every host: export MASTER_ADDR={address} MASTER_PORT={port}"

    @property
    def again(self) -> str:
        """The command that repeats the check; more flags of the doctor may follow."""
        if self.slurm:
            return "srun drumline doctor"
        if self.number is None:
            names = f" --names {','.join(self.names)}" if self.names else ""
            return f"on every host: drumline doctor --nnodes {self.hosts} --rdzv_endpoint {self.where}{names}"
        endpoint = f"--master_addr={self.address} --master_port={self.port}"
        return f"on every host: torchrun --nnodes={self.hosts} --node_rank=NUMBER {endpoint} -m drumline doctor"


def find_rendezvous(environ: Mapping[str, str]) -> Rendezvous | None:
    """The rendezvous from the variables of torchrun, srun or drumline; None if there are no other hosts."""
    place = find_place(environ)
    if place.size == 1:
        return None
    by_slurm = "RANK" not in environ or "WORLD_SIZE" not in environ
    names: tuple[str, ...] = ()
    if by_slurm:
        hosts, number = _number(environ, "SLURM_STEP_NUM_NODES", 1), _number(environ, "SLURM_NODEID", 0)
        names = tuple(slurm_hosts(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))))
        spare = place.local_rank > 0
    else:
        # Without a number of ranks per host, each rank counts as a host.
        local_size = max(1, _number(environ, "LOCAL_WORLD_SIZE", 1))
        hosts = _number(environ, "GROUP_WORLD_SIZE", place.size // local_size)
        number = _number(environ, "GROUP_RANK", place.rank // local_size)
        spare = local_size > 1 and place.local_rank > 0
    if hosts < 2:
        return None
    agent_keeps = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Rendezvous(
        address=place.master_addr,
        port=place.master_port,
        hosts=hosts,
        keeps=place.rank == 0 and not agent_keeps,
        leads=place.rank == 0,
        number=number,
        spare=spare,
        names=names if len(names) == hosts else (),
        slurm=by_slurm,
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, str(default))
    if not value.isdigit():
        raise ConfigError(
            f"the environment variable {name} is {value!r}, not a number",
            fix=f"unset {name}, or let torchrun or srun set it",
        )
    return int(value)


def rendezvous_at(endpoint: str, *, hosts: int, names: Sequence[str] = ()) -> Rendezvous:
    """Rendezvous at HOST:PORT; the host with this name or address runs the store."""
    where = Endpoint.parse(endpoint)
    if names and len(names) != hosts:
        raise ConfigError(
            f"--names lists {len(names)} hosts, --nnodes says {hosts}",
            fix=f"drumline doctor --nnodes {len(names)} --rdzv_endpoint {endpoint} --names {','.join(names)}",
        )
    here = is_here(where.host)
    return Rendezvous(address=where.host, port=where.port, hosts=hosts, keeps=here, leads=here, names=tuple(names))


def connect(rendezvous: Rendezvous, *, patience_s: float, say: Callable[[str], None]) -> Store:
    """The store of a rendezvous, created or connected to; CheckEndedError with the reason if that fails."""
    if rendezvous.keeps:
        return _prefixed(keep(rendezvous), rendezvous)
    approach(rendezvous, patience_s=patience_s, say=say)
    timeout = timedelta(seconds=_ANSWER_S)
    try:
        store = within(
            _ANSWER_S + 1, lambda: TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=timeout)
        )
    except (TimeoutError, RuntimeError) as error:
        what = f"{rendezvous.where} is open, but not a torch store: {str(error).splitlines()[0]}"
        fix = f"ss -ltnp 'sport = :{rendezvous.port}'"
        raise CheckEndedError(Finding(f"port {rendezvous.port}", "failed", what, fix, rendezvous.address)) from None
    return _prefixed(store, rendezvous)


def keep(rendezvous: Rendezvous) -> TCPStore:
    """Run the store here, where the others look for it and nowhere else."""
    addresses = listens_at(rendezvous.address)
    address = addresses[0] if len(addresses) == 1 else ""
    try:
        return TCPStore(
            address or "localhost",
            rendezvous.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_ANSWER_S),
            master_listen_fd=listener(address, rendezvous.port).detach(),
        )
    except (OSError, dist.DistNetworkError) as error:
        name = socket.gethostname()
        what = f"{name} cannot listen on port {rendezvous.port}: {str(error).splitlines()[0]}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            what = f"port {rendezvous.port} on {name}, the rendezvous port, is in use{user_of(rendezvous.port)}"
        fix = rendezvous.moved(rendezvous.address, rendezvous.port + 1)
        raise CheckEndedError(Finding(f"port {rendezvous.port}", "failed", what, fix, name)) from None


def approach(
    rendezvous: Rendezvous, *, patience_s: float, say: Callable[[str], None], say_every_s: float = _SAY_S
) -> None:
    """Wait until the rendezvous endpoint accepts connections; CheckEndedError with the reason after a timeout."""
    since = time.monotonic()
    until, say_at = since + patience_s, since + say_every_s
    why: Why = ""
    while True:
        try:
            timeout_s = min(_CONNECT_S, max(_RETRY_S, until - time.monotonic()))
            socket.create_connection((rendezvous.address, rendezvous.port), timeout=timeout_s).close()
            return
        except OSError as error:
            why = why_not(error)
            lasting = isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN
        if lasting or time.monotonic() > until:
            raise CheckEndedError(_unreachable(rendezvous, why, waited_s=time.monotonic() - since))
        if time.monotonic() > say_at:
            say(f"waiting for {rendezvous.where} to answer ({why}); start the {rendezvous.task} there too")
            say_at += 2 * say_every_s
        time.sleep(_RETRY_S)


def _unreachable(rendezvous: Rendezvous, why: Why, *, waited_s: float) -> Finding:
    own, there, port = socket.gethostname(), rendezvous.address, rendezvous.port
    if why == "unresolved":
        what = f"the rendezvous host {there} does not resolve on {own}"
        return Finding("name", "failed", what, f"echo 'ADDRESS {there}' >> /etc/hosts", own)
    address = next(iter(resolve(there)), there)
    shown = there if address == there else f"{there} ({address})"
    since = f"for {waited_s:.0f} s"
    if why == "refused":
        what = f"{shown} has refused {own} on port {port} {since}: nothing listens there, or a firewall rejects it"
        fix = f"start the {rendezvous.task} on {there} too; if it runs there: ufw allow {port}/tcp"
        return Finding(f"port {port}", "failed", what, fix, there)
    if why == "no route":
        down = next(
            (interface.name for interface in find_interfaces() if not interface.is_up and not interface.is_loopback),
            None,
        )
        what = f"{own} has no route to {shown}" + (f"; its interface {down} is down" if down else "")
        fix = f"ip link set dev {down} up" if down else f"ip route get {address}"
        return Finding("route", "failed", what, fix, own)
    if why == "forbidden":
        what = f"{own}'s own firewall blocks connections to {shown} port {port}"
        return Finding(f"port {port}", "failed", what, f"ufw allow out {port}/tcp", own)
    reason = {
        "timed out": "does not answer: a firewall there or on the way drops the packets",
        "unreachable": "is unreachable: it is off, its interface is down, or a firewall there rejects the connection",
    }.get(why, "closes every connection")
    what = f"{own} tried {shown} port {port} {since}: it {reason}"
    return Finding(f"port {port}", "failed", what, f"ufw allow {port}/tcp", there)


class Messenger:
    """Posts and reads messages in the store. A call that times out ends the check and names the store's host."""

    def __init__(self, store: Store, keeper: str) -> None:
        self.store = store
        self._keeper = keeper
        self._key = os.environ.get(SECRET, "")

    def post(self, key: str, value: Any) -> None:
        """Post any JSON value."""
        content = signed(self._key, key, json.dumps(value)).encode()
        pieces = [content[start : start + _PIECE_BYTES] for start in range(0, len(content), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._set(f"{key}/{number}", piece)
        self._set(key, str(len(pieces)).encode())

    def has(self, key: str) -> bool:
        return self._call(lambda: self.store.check([key]))

    def read(self, key: str) -> Any:
        """The value posted under a key, which must exist."""
        try:
            count = int(self._get(key))
            content = b"".join(self._get(f"{key}/{number}") for number in range(count)).decode()
            return json.loads(verified(self._key, key, content))
        except ValueError:
            what = "a host has another secret, or someone else wrote to the rendezvous store"
            raise CheckEndedError(
                Finding("rendezvous", "failed", what, f"set the same {SECRET} on every host, or none", self._keeper)
            ) from None

    def wait(self, key: str, *, until: float) -> Any | None:
        """The value posted under a key before `until` (monotonic clock); None if there is none."""
        while not self.has(key):
            if time.monotonic() > until:
                return None
            time.sleep(_LOOK_S)
        return self.read(key)

    def count(self, key: str) -> int:
        """The next number of a counter, from 1."""
        return self._call(lambda: self.store.add(key, 1))

    def _get(self, key: str) -> bytes:
        return self._call(lambda: self.store.get(key))

    def _set(self, key: str, piece: bytes) -> None:
        self._call(lambda: self.store.set(key, piece))  # type: ignore[arg-type]
        # Wait for the reply: pieces queued together would be sent as one large packet.
        self.has(key)

    def _call(self, work: Callable[[], T]) -> T:
        try:
            return within(_ANSWER_S, work)
        except (TimeoutError, RuntimeError):
            what = f"{self._keeper}, which runs the rendezvous store, stopped responding"
            raise CheckEndedError(
                Finding("rendezvous", "failed", what, f"ping -c 3 {self._keeper}", self._keeper)
            ) from None


def _prefixed(store: Store, rendezvous: Rendezvous) -> Store:
    return PrefixStore(f"drumline/doctor/{rendezvous.attempt}", store)
