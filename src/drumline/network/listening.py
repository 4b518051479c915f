"""A port for a server of this machine."""

from __future__ import annotations

import errno
import socket

from drumline.errors import ConfigError
from drumline.network.endpoint import LAST_PORT, Endpoint


def bound(host: str, *ports: int) -> socket.socket:
    """A socket at the first of these ports that is free, which does not listen yet; ConfigError if there is none."""
    if wrong := [port for port in ports if not 0 <= port <= LAST_PORT]:
        raise ConfigError(
            f"{wrong[0]} is no port", fix=f"choose one from 1 to {LAST_PORT}; --port 0 takes any that is free"
        )
    *others, last = ports
    for port in others:
        try:
            return _bound(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                break  # the last one has the same problem, and tells it
    try:
        return _bound(host, last)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"cannot serve at {Endpoint(host, last)}: "
            f"{'another process uses that port' if in_use else error.strerror or error}",
            fix="choose another one: --port 0 takes any that is free" if in_use else "choose another --host or --port",
        ) from None


def _bound(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
