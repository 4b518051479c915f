"""The hosts of a run as the user writes them: a,b:2,user@c:4, or a file in OpenMPI's or MPICH's format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drumline.errors import ConfigError

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?:({_NAME})@)?({_NAME})(?::([0-9]+))?", re.ASCII)
_SLOTS = re.compile(r"(max[-_])?slots=([0-9]+)", re.ASCII)


@dataclass(frozen=True)
class RemoteHost:
    """A machine that is reached over ssh."""

    name: str
    user: str = ""
    """Empty: ssh's default user."""
    slots: int | None = None
    """Number of ranks to start there; None: not given."""

    @property
    def target(self) -> str:
        """The argument for ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(text: str) -> list[RemoteHost]:
    """The hosts of `a,b:2,user@c:4`."""
    words = [word.strip() for word in text.split(",")]
    return _checked((_host(word, f"--hosts {text}"), f"--hosts {text}") for word in words)


def read_hosts(path: Path) -> list[RemoteHost]:
    """The hosts in a file, one per line: `host`, `host slots=4` or `host:4`; # starts a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the hosts in {path}: {why}", fix="give a file, one host a line") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if words := line.partition("#")[0].split():
            hosts.append((_with_slots(_host(words[0], where), words[1:], where), where))
    if not hosts:
        raise ConfigError(f"there are no hosts in {path}", fix=f"echo 'host-a slots=8' >> {path}")
    return _checked(hosts)


def _host(word: str, where: str) -> RemoteHost:
    match = _HOST.fullmatch(word)
    if match is None:
        raise ConfigError(f"{where}: {word!r} is not a host", fix="write name, name:4 for 4 ranks, or user@name")
    user, name, slots = match.groups()
    return RemoteHost(name, user or "", int(slots) if slots else None)


def _with_slots(host: RemoteHost, words: list[str], where: str) -> RemoteHost:
    """slots=N, and max_slots=N, which is ignored: drumline never oversubscribes."""
    for word in words:
        match = _SLOTS.fullmatch(word)
        if match is None or (host.slots is not None and not match[1]):
            raise ConfigError(f"{where}: cannot parse {word!r}", fix=f"as in: {host.target} slots=4")
        if not match[1]:
            host = RemoteHost(host.name, host.user, int(match[2]))
    return host


def _checked(hosts: Iterable[tuple[RemoteHost, str]]) -> list[RemoteHost]:
    by_name: dict[str, RemoteHost] = {}
    for host, where in hosts:
        if host.slots == 0:
            raise ConfigError(f"{where}: {host.name} has 0 slots", fix="give it 1 or more, or remove it")
        if host.name in by_name:
            raise ConfigError(
                f"{where}: {host.name} is listed twice", fix=f"list it once, with its ranks: {host.name}:2"
            )
        by_name[host.name] = host
    return list(by_name.values())
