"""Signed messages over a connection: who does not know the run's secret can neither send one nor change, repeat or
reorder those of others. Nothing is encrypted.

Both ends open with MAGIC and a random number. From these and the secret follow two keys, one per direction, so that
nothing recorded on another connection is valid on this one. A message is

    length (4 bytes) | HMAC-SHA256 of its number and its content (32 bytes) | content: JSON

The server signs first. Bytes in, messages out: sockets are the caller's.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

MAGIC = b"drumline rdzv 1\n"
NONCE_BYTES, MAC_BYTES = 32, 32
LONGEST_FIRST, LONGEST = 4 << 10, 1 << 20
"""Bytes of a message: of the first one, before which the other end may be anyone, and of all others."""
_HEADER = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 16


class WireError(Exception):
    """What arrived is not drumline's."""


class ForeignError(WireError):
    """What arrived was not signed with this end's secret."""


class Channel:
    """One end of a connection."""

    def __init__(self, secret: bytes, *, serves: bool) -> None:
        """serves: whether this end was connected to, and answers"""
        self._secret, self._serves = secret, serves
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._heard = bytearray()
        self._write_key = self._read_key = b""
        self._written = self._read = 0
        self.output = bytearray()
        """What the caller has to send, and removes."""
        if not serves:
            self.output += MAGIC + self._nonce

    @property
    def is_trusted(self) -> bool:
        """Whether the other end has shown that it knows the secret."""
        return self._read > 0

    def write(self, message: Any) -> None:
        """Add a message (any JSON) to `output`; ValueError if it is too long."""
        content = json.dumps(message, separators=(",", ":")).encode()
        if len(content) > LONGEST:
            raise ValueError(f"a message of {len(content):,} bytes; at most {LONGEST:,} are read")
        self.output += _HEADER.pack(len(content)) + _mac(self._write_key, self._written, content) + content
        self._written += 1

    def feed(self, received: bytes) -> list[Any]:
        """The messages that are complete with these bytes; WireError for anything else, after which it is useless."""
        self._heard += received
        if not self._read_key and not self._shake_hands():
            return []
        messages = []
        while (message := self._next()) is not None:
            messages.append(json.loads(message))
        return messages

    def _shake_hands(self) -> bool:
        whole = len(MAGIC) + NONCE_BYTES
        if not MAGIC.startswith(self._heard[: len(MAGIC)]):
            raise WireError("the other end does not speak drumline's protocol")
        if len(self._heard) < whole:
            return False
        theirs = bytes(self._heard[len(MAGIC) : whole])
        del self._heard[:whole]
        both = theirs + self._nonce if self._serves else self._nonce + theirs
        keys = [hmac.digest(self._secret, purpose + both, hashlib.sha256) for purpose in (b"ask", b"answer")]
        self._read_key, self._write_key = keys if self._serves else keys[::-1]
        if self._serves:
            self.output += MAGIC + self._nonce
            self.write({})  # shows that this end knows the secret
        return True

    def _next(self) -> bytes | None:
        if len(self._heard) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._heard)
        if length > (LONGEST if self.is_trusted else LONGEST_FIRST):
            raise WireError(f"the other end announces a message of {length:,} bytes")
        start = _HEADER.size + MAC_BYTES
        if len(self._heard) < start + length:
            return None
        mac, content = bytes(self._heard[_HEADER.size : start]), bytes(self._heard[start : start + length])
        if not hmac.compare_digest(mac, _mac(self._read_key, self._read, content)):
            raise ForeignError("a message was not signed with this run's secret")
        del self._heard[: start + length]
        self._read += 1
        return content


def _mac(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + content, hashlib.sha256)


class Line:
    """A client's connection: a socket with its Channel."""

    def __init__(self, connection: socket.socket, channel: Channel) -> None:
        self._socket, self._channel = connection, channel

    @classmethod
    def dial(cls, host: str, port: int, secret: bytes, *, connect_s: float, answer_s: float) -> Line:
        """Connect, and have the other end show that it knows the secret; OSError or WireError if that fails."""
        line = cls(socket.create_connection((host, port), timeout=connect_s), Channel(secret, serves=False))
        try:
            line._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line._socket.settimeout(answer_s)
            line._flush()
            while not line._channel.is_trusted:
                line.receive()
        except BaseException as error:
            if isinstance(error, ForeignError):
                with contextlib.suppress(OSError):
                    line.send({})  # so that the other end learns of it too
            line.close()
            raise
        return line

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        self._channel.write(message)
        self._flush()

    def receive(self) -> list[Any]:
        """The messages of the next bytes, possibly none; OSError if the connection was closed."""
        received = self._socket.recv(_CHUNK_BYTES)
        if not received:
            raise ConnectionResetError("the other end closed the connection")
        return self._channel.feed(received)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
        self._socket.close()

    def _flush(self) -> None:
        self._socket.sendall(self._channel.output)
        self._channel.output.clear()
