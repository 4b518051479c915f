"""What hosts tell each other when they are checked together: facts about each, and what one saw of another.

Everything here goes through the store as JSON.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from drumline.agreement import versions
from drumline.cards import Card, find_cards, gloo_address
from drumline.disk import file_sha256
from drumline.errors import DataError
from drumline.probe import Why
from drumline.token_manifest import MANIFEST, read_manifest

Use = Literal["gloo", "nccl"]

_MOST_CARDS = 8


@dataclass(frozen=True)
class HostFacts:
    """One host, as it describes itself."""

    number: int
    host: str
    cards: tuple[Card, ...]
    """Those that are up and may lead to other hosts."""
    gloo: str | None
    """The address it would announce; None: it would find none."""
    nccl: str | None = None
    """The same for NCCL; None where there are no GPUs."""
    versions: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    """A hash for each file that training reads."""
    data_paths: Mapping[str, str] = field(default_factory=dict)
    """Where they lie here, by the name that comes before the slash."""
    token: str = field(default="", repr=False)
    ports: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Where its probe server listens: by address, for connections and for datagrams."""

    @property
    def addresses(self) -> list[str]:
        return [address for card in self.cards for address in card.addresses]

    def announced(self, use: Use) -> str | None:
        return self.gloo if use == "gloo" else self.nccl

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> HostFacts:
        cards = tuple(Card(**{**card, "addresses": tuple(card["addresses"])}) for card in told["cards"])
        return cls(**{**told, "cards": cards})


@dataclass(frozen=True)
class Sight:
    """What one host saw of another at the address that it announces for gloo or NCCL."""

    source: int
    target: int
    use: Use = "gloo"
    address: str = ""
    why: Why = ""
    """Why nothing answers there; empty: it does."""
    other: str = ""
    """Another address of that host, which does answer."""
    own_address: str = ""
    """From where packets to it leave."""
    name_means: str = ""
    """What the target's name means on the source; empty: it does not resolve."""
    rtt_s: float = 0.0
    skew_s: float = 0.0
    bytes_per_s: float = 0.0
    stalled: bool = False
    largest_packet: int = 0
    """Where it stalled: the largest that passes; 0: not known."""
    segments: int = 0
    retransmitted: int = 0

    @property
    def reached(self) -> bool:
        return not self.why or bool(self.other)

    def as_dict(self) -> dict[str, Any]:
        """Without what has its usual value, so that many of them stay short."""
        usual = asdict(Sight(-1, -1))
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


def own_facts(number: int, environ: Mapping[str, str], *, data: Sequence[Path]) -> HostFacts:
    """This host; the probe server's ports and token are still to come."""
    every = find_cards()
    cards = tuple(card for card in every if card.is_up and not card.is_loopback and _outward(card))
    found = versions()
    return HostFacts(
        number=number,
        host=socket.gethostname(),
        cards=tuple(Card(card.name, _outward(card), card.mtu, True, card.speed_mbit) for card in cards[:_MOST_CARDS]),
        gloo=gloo_address(environ, every),
        nccl=nccl_address(environ, cards) if found["nccl"] != "none" else None,
        versions=found,
        data={name: digest for path in data for name, digest in data_hashes(path).items()},
        data_paths={path.name: str(path.absolute()) for path in data},
    )


def nccl_address(environ: Mapping[str, str], cards: Sequence[Card]) -> str | None:
    """The address that NCCL takes for its connections: of the first card that NCCL_SOCKET_IFNAME allows.

    Its rule: names are beginnings of names unless the list starts with =, and forbidden ones if it starts with ^.
    Without the variable it takes InfiniBand's cards first, and docker's last.
    """
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    names = tuple(name for name in wanted.lstrip("^=").split(",") if name)
    if not names:
        usable = sorted(cards, key=lambda card: (card.name.startswith("docker"), not card.name.startswith("ib")))
    elif wanted.startswith("^"):
        usable = [card for card in cards if not card.name.startswith(names)]
    else:
        exact = wanted.startswith("=")
        usable = [card for card in cards if (card.name in names if exact else card.name.startswith(names))]
    return next((card.addresses[0] for card in usable), None)


def data_hashes(path: Path) -> dict[str, str]:
    """What training would read at a path: the files of a prepared folder, a single file, or names and sizes."""
    if (path / MANIFEST).exists():
        try:
            return {f"{path.name}/{name}": record.sha256 for name, record in read_manifest(path).files.items()}
        except DataError as error:
            return {path.name: error.problem}
    if path.is_file():
        return {path.name: file_sha256(path)}
    if not path.is_dir():
        return {path.name: "missing"}
    listing = sorted(
        f"{each.relative_to(path)} {each.stat().st_size}"
        for each in path.rglob("*")
        if each.is_file() and not each.name.startswith(".")
    )
    return {path.name: hashlib.sha256("\n".join(listing).encode()).hexdigest()}


def _outward(card: Card) -> tuple[str, ...]:
    """Addresses that another host could use."""
    return tuple(address for address in card.addresses if not address.startswith(("127.", "fe80", "169.254.", "::1")))
