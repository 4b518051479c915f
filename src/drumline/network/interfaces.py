"""The network interfaces of this machine, including InfiniBand, and which of them gloo and NCCL would use."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali")
"""Interfaces that do not lead outside the machine."""
_BACKLOG = 4096
_NEVER_GIVEN = range(20_000, 29_000)
"""Ports that no system gives a connection by default (Linux begins at 32,768), and Kubernetes no service."""
_TRIES = 100


@dataclass(frozen=True)
class Interface:
    """One network interface of this machine."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    is_up: bool
    speed_mbit: int = 0
    """0: unknown."""

    @property
    def is_loopback(self) -> bool:
        return self.name == "lo" or any(map(is_loopback, self.addresses))

    @property
    def is_virtual(self) -> bool:
        return self.name.startswith(_VIRTUAL)


def is_loopback(address: str) -> bool:
    """Whether an address (IPv4 or IPv6) is a loopback address, or the name localhost."""
    try:
        parsed = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return address == "localhost"
    mapped = getattr(parsed, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or parsed).is_loopback


def find_interfaces() -> list[Interface]:
    """All interfaces, those that lead to other machines first."""
    stats = psutil.net_if_stats()
    interfaces = []
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            entry.address.split("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        stat = stats.get(name)
        if stat is not None:
            interfaces.append(Interface(name, addresses, stat.mtu, stat.isup, stat.speed))
    return sorted(
        interfaces,
        key=lambda interface: (interface.is_loopback, interface.is_virtual, not interface.is_up, interface.name),
    )


@dataclass(frozen=True)
class InfiniBandPort:
    """One port of an InfiniBand or RoCE device, as the kernel describes it."""

    device: str
    number: int
    state: str
    """ACTIVE, DOWN, INIT (not configured by a subnet manager)."""
    layer: str
    rate: str

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


def find_infiniband(root: Path = Path("/sys/class/infiniband")) -> list[InfiniBandPort]:
    """All InfiniBand and RoCE ports. Takes no time."""
    ports = []
    for folder in sorted(root.glob("*/ports/*")):
        try:
            state, layer, rate = ((folder / name).read_text().strip() for name in ("state", "link_layer", "rate"))
        except OSError:
            continue
        state = state.rpartition(" ")[2]  # "4: ACTIVE"
        rate = rate.partition(" (")[0]  # "200 Gb/sec (4X HDR)"
        ports.append(InfiniBandPort(folder.parts[-3], int(folder.name), state, layer, rate))
    return ports


def address_towards(host: str) -> str | None:
    """The source address of packets to that host; None if there is no route."""
    with contextlib.suppress(OSError):  # an unknown name
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """The interface that has this address."""
    return next((interface for interface in interfaces if address in interface.addresses), None)


def gloo_address(environ: Mapping[str, str], interfaces: Sequence[Interface]) -> str | None:
    """The address that gloo announces to the other ranks, as torch chooses it; None if it would find none and fail.

    torch's rule: the first address of GLOO_SOCKET_IFNAME, else what this machine's own name resolves to, else lo. The
    second is a trap where /etc/hosts maps the name to 127.0.1.1, as Debian's installer does.
    """
    if wanted := environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        interface = next((interface for interface in interfaces if interface.name == wanted), None)
        return next(iter(interface.addresses), None) if interface else None
    try:
        answers = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for family, kind, protocol, _, where in answers:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((where[0], 0))
            except OSError:
                continue
            return str(where[0])
    return "127.0.0.1"


def gloo_is_misled(environ: Mapping[str, str]) -> bool:
    """Whether gloo, left to itself, would announce an address that only this machine can reach."""
    if environ.get("GLOO_SOCKET_IFNAME"):
        return False
    address = gloo_address(environ, find_interfaces())
    return address is None or is_loopback(address)


def interface_towards(host: str) -> str | None:
    """The name of the interface that leads to another host; None if none does, or the host is this machine."""
    address = address_towards(host)
    interface = interface_of(address, find_interfaces()) if address and not is_loopback(address) else None
    return interface.name if interface else None


def free_port() -> int:
    """A port that is not in use, and that no connection of another program is given before it is taken."""
    for _ in range(_TRIES):
        port = secrets.choice(_NEVER_GIVEN)
        if is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens at one address of this machine, or at all of them if it is empty; OSError if it cannot."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def is_free(port: int) -> bool:
    """Whether a port of this machine is not in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
