"""What hosts exchange when they check each other: facts about each, and what each saw of the others.

Everything here is sent through the store as JSON.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from drumline.data import MANIFEST, TOKENIZER, FileRecord, read_manifest
from drumline.errors import DataError
from drumline.files import file_sha256
from drumline.network import Interface, Why, find_interfaces, gloo_address, is_loopback
from drumline.parallel import versions

Use = Literal["gloo", "nccl"]

DIGEST_LETTERS = 64
BY_MANIFEST, BY_NAME = " by manifest and size", " by name and size"
"""Appended to the digest of data that was not hashed itself."""
_MOST_INTERFACES = 8


@dataclass(frozen=True)
class HostFacts:
    """A host's description of itself."""

    number: int
    host: str
    interfaces: tuple[Interface, ...]
    """Interfaces that are up and may lead to other hosts."""
    gloo: str | None
    """The address that gloo would announce; None if it would find none."""
    nccl: str | None = None
    """The same for NCCL; None without GPUs."""
    versions: Mapping[str, str] = field(default_factory=dict)
    data_paths: Mapping[str, str] = field(default_factory=dict)
    """Paths of the data to compare, by name."""
    hashed_bytes: int = 0
    """How much of it is hashed."""
    token: str = field(default="", repr=False)
    ports: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ports of its probe server: by address, for TCP and UDP."""

    @property
    def addresses(self) -> list[str]:
        return [address for interface in self.interfaces for address in interface.addresses]

    def announced(self, use: Use) -> str | None:
        return self.gloo if use == "gloo" else self.nccl

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> HostFacts:
        interfaces = tuple(
            Interface(**{**interface, "addresses": tuple(interface["addresses"])}) for interface in fields["interfaces"]
        )
        return cls(**{**fields, "interfaces": interfaces})


@dataclass(frozen=True)
class Sight:
    """What one host saw of another at the address that it announces for gloo or NCCL."""

    source: int
    target: int
    use: Use = "gloo"
    address: str = ""
    why: Why = ""
    """Why it cannot be reached there; empty: it can."""
    other: str = ""
    """Another address of that host that can be reached."""
    own_address: str = ""
    """Source address of packets to it."""
    name_means: str = ""
    """What the target's name resolves to on the source; empty: it does not."""
    rtt_s: float = 0.0
    skew_s: float = 0.0
    bytes_per_s: float = 0.0
    stalled: bool = False
    largest_packet: int = 0
    """If it stalled, the largest packet that passes; 0: unknown."""
    segments: int = 0
    retransmitted: int = 0

    @property
    def reached(self) -> bool:
        return not self.why or bool(self.other)

    def as_dict(self) -> dict[str, Any]:
        """Without default values, to keep messages short."""
        usual = asdict(Sight(-1, -1))
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


def label(facts: HostFacts, hosts: Sequence[HostFacts]) -> str:
    """A host's name, with its number if another one has the same name."""
    twice = sum(each.host == facts.host for each in hosts) > 1
    return f"{facts.host} (host {facts.number})" if twice else facts.host


def own_facts(number: int, environ: Mapping[str, str], *, data: Sequence[Path]) -> HostFacts:
    """Facts about this host; the probe server's ports and token are filled in later."""
    every = find_interfaces()
    interfaces = tuple(
        interface for interface in every if interface.is_up and not interface.is_loopback and _outward(interface)
    )
    own_versions = versions()
    return HostFacts(
        number=number,
        host=socket.gethostname(),
        interfaces=tuple(
            Interface(interface.name, _outward(interface), interface.mtu, True, interface.speed_mbit)
            for interface in interfaces[:_MOST_INTERFACES]
        ),
        gloo=gloo_address(environ, every),
        nccl=nccl_address(environ, interfaces) if own_versions["nccl"] != "none" else None,
        versions=own_versions,
        data_paths={path.name: str(path.absolute()) for path in data},
        hashed_bytes=sum(_hashed_bytes(path) for path in data),
    )


def nccl_address(environ: Mapping[str, str], interfaces: Sequence[Interface]) -> str | None:
    """The address that NCCL uses: of the first interface that NCCL_SOCKET_IFNAME allows.

    NCCL's rule: names are prefixes unless the list starts with =, and excluded if it starts with ^.
    Without the variable, InfiniBand interfaces come first and docker's last.
    """
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    names = tuple(name for name in wanted.lstrip("^=").split(",") if name)
    if not names:
        usable = sorted(
            interfaces, key=lambda interface: (interface.name.startswith("docker"), not interface.name.startswith("ib"))
        )
    elif wanted.startswith("^"):
        usable = [interface for interface in interfaces if not interface.name.startswith(names)]
    else:
        exact = wanted.startswith("=")
        usable = [
            interface
            for interface in interfaces
            if (interface.name in names if exact else interface.name.startswith(names))
        ]
    return next((interface.addresses[0] for interface in usable), None)


def is_digest(value: str) -> bool:
    """Whether a value of data_hashes is a digest, and not an error."""
    return len(value) >= DIGEST_LETTERS and set(value[:DIGEST_LETTERS]) <= set("0123456789abcdef")


def data_hashes(path: Path) -> dict[str, str]:
    """What training would read from a path: a digest for each file or folder, or what is wrong with it.

    Files are hashed, and so is the tokenizer of a prepared folder. Its tokens are compared by manifest and size, other
    folders by the names and sizes of their files.
    """
    if (path / MANIFEST).exists():
        try:
            files = read_manifest(path).files
        except DataError as error:
            return {path.name: error.problem}
        return {f"{path.name}/{name}": _prepared(path / name, record) for name, record in files.items()}
    if path.is_dir():
        return {path.name: _listing(path)}
    return {path.name: _content(path)}


def _prepared(path: Path, record: FileRecord) -> str:
    if path.name == TOKENIZER:
        return _content(path)
    try:
        size_bytes = path.stat().st_size
    except OSError:
        return "missing"
    if size_bytes != record.bytes:
        return f"{size_bytes} bytes, but {record.bytes} in its manifest"
    return record.sha256 + BY_MANIFEST


def _content(path: Path) -> str:
    try:
        return file_sha256(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable ({error.strerror})"


def _listing(folder: Path) -> str:
    try:
        files = [each for each in folder.rglob("*") if each.is_file() and not each.name.startswith(".")]
        lines = sorted(f"{each.relative_to(folder)} {each.stat().st_size}" for each in files)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() + BY_NAME


def _hashed_bytes(path: Path) -> int:
    """How many bytes data_hashes reads there."""
    try:
        return (path / TOKENIZER if (path / MANIFEST).exists() else path).stat().st_size
    except OSError:
        return 0


def _outward(interface: Interface) -> tuple[str, ...]:
    """Addresses that other hosts could use."""
    return tuple(
        address
        for address in interface.addresses
        if not is_loopback(address) and not address.startswith(("fe80", "169.254."))
    )
