"""HOST:PORT, as in flags and messages."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from drumline.config import RENDEZVOUS_PORT
from drumline.errors import ConfigError

_HOST, _PORT = re.compile(r"[^\s:/\[\]]+"), re.compile(r"[0-9]{1,5}")
_FORM = re.compile(rf"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>{_HOST.pattern}))(?::(?P<port>{_PORT.pattern}))?")
LAST_PORT = (1 << 16) - 1


@dataclass(frozen=True)
class Endpoint:
    """A host name or address, and a port; `str` formats it as a user would type it."""

    host: str
    """IPv6 addresses without brackets."""
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, *, default_port: int = RENDEZVOUS_PORT, flag: str = "--rdzv_endpoint") -> Endpoint:
        """Parse HOST, HOST:PORT, [IPV6]:PORT, or an IPv6 address alone; ConfigError for anything else."""
        if _is_ipv6(text):
            return cls(text, default_port)
        form = _FORM.fullmatch(text)
        host = form and (form["v6"] or form["host"])
        port = int(form["port"] or default_port) if form else 0
        if form is None or not host or not 0 < port <= LAST_PORT or (form["v6"] and not _is_ipv6(host)):
            raise ConfigError(f"{flag} {text} is not HOST:PORT", fix=f"as in {flag} {_meant(text, default_port)}")
        return cls(host, port)


def _meant(text: str, default_port: int) -> Endpoint:
    """The endpoint that the user most likely meant."""
    host, _, port = text.rpartition(":")
    if _is_ipv6(host):
        return Endpoint(host, int(port) if _PORT.fullmatch(port) and 0 < int(port) <= LAST_PORT else default_port)
    return Endpoint(host if _HOST.fullmatch(host) else "HOST", default_port)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
