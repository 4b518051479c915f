"""The part of HTTP that a page on this machine needs: GET, answers of a known length, and streams of events."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, unquote, urlsplit

from drumline.network import is_loopback

_HEAD_BYTES = 16 << 10
_HEAD_S, _IDLE_S, _WRITE_S = 10.0, 60.0, 30.0
_CONTENT_SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _CONTENT_SECURITY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Request:
    """What was asked."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    """Names in small letters."""

    def first(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]


@dataclass
class Response:
    """The answer. events: instead of a body, sent as they come, until the page leaves."""

    body: bytes = b""
    type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: dict[str, str] = field(default_factory=dict)
    events: AsyncIterator[bytes] | None = None


Answer = Callable[[Request], Awaitable[Response]]


def refused(status: HTTPStatus, why: str) -> Response:
    """An answer that says why not."""
    return Response(f"{why}\n".encode(), status=status)


async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
    """Answer the requests of one connection, one after the other."""
    # Cancelled: the server ends. Python 3.11 would print a traceback for each page that is still open.
    with suppress(asyncio.CancelledError):
        await _serve(reader, writer, answer)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        wait_s = _HEAD_S
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                request = parse_head(head)
            except (asyncio.LimitOverrunError, ValueError):
                await _send(writer, refused(HTTPStatus.BAD_REQUEST, "not a request"), method="GET", stays=False)
                break
            if request.method not in ("GET", "HEAD"):
                response = refused(HTTPStatus.METHOD_NOT_ALLOWED, "this page can only be read")
            else:
                response = await answer(request)
            has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
            stays = not has_body and response.events is None and request.headers.get("connection") != "close"
            await _send(writer, response, method=request.method, stays=stays)
            if response.events is not None and request.method == "GET":
                await _stream(reader, writer, response.events)
            if not stays:
                break
            wait_s = _IDLE_S
    with suppress(OSError):
        writer.close()
        await writer.wait_closed()


def parse_head(head: bytes) -> Request:
    """The first lines of a request; ValueError if they are none."""
    if len(head) > _HEAD_BYTES:
        raise ValueError("too long")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or (name.lower() == "host" and "host" in headers):
            raise ValueError(line)
        headers[name.lower()] = value.strip()
    parts = urlsplit(target)
    return Request(method, unquote(parts.path), parse_qs(parts.query, keep_blank_values=True), headers)


async def _send(writer: asyncio.StreamWriter, response: Response, *, method: str, stays: bool) -> None:
    headers = {"Content-Type": response.type, **_HEADERS, **response.headers}
    if response.events is None:
        headers["Content-Length"] = str(len(response.body))
    headers["Connection"] = "keep-alive" if stays else "close"
    first = f"HTTP/1.1 {response.status.value} {response.status.phrase}"
    lines = [first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode("latin-1") + (b"" if method == "HEAD" else response.body))
    async with asyncio.timeout(_WRITE_S):
        await writer.drain()


async def _stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, events: AsyncIterator[bytes]) -> None:
    """Until the page closes its end, or takes nothing any more."""
    gone = asyncio.ensure_future(reader.read(1))
    sending = asyncio.ensure_future(_send_events(writer, events))
    try:
        await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (gone, sending):
            task.cancel()
        await asyncio.gather(gone, sending, return_exceptions=True)


async def _send_events(writer: asyncio.StreamWriter, events: AsyncIterator[bytes]) -> None:
    async for event in events:
        writer.write(event)
        async with asyncio.timeout(_WRITE_S):
            await writer.drain()


class Gate:
    """Who may ask: on this machine any page that was opened by its address; from others whoever has the token."""

    def __init__(self, token: str | None) -> None:
        self._token, self.cookie = token, "drumline_watch"

    def check(self, request: Request) -> Response | None:
        """The refusal; None if the request may pass."""
        if self._token is None:
            # A name that an attacker's DNS points to this machine is not one of its own.
            host = request.headers.get("host", "")
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if not is_loopback(name.strip("[]")):
                return refused(HTTPStatus.FORBIDDEN, "this page is at 127.0.0.1 or localhost only")
            return None
        given = request.first("token") or _cookie(request.headers.get("cookie", ""), self.cookie)
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return refused(HTTPStatus.FORBIDDEN, "this page needs the token in the address that drumline watch printed")
        return None

    def remember(self, request: Request) -> dict[str, str]:
        """Headers after which the browser sends the token by itself."""
        if self._token is None or "token" not in request.query:
            return {}
        return {"Set-Cookie": f"{self.cookie}={self._token}; HttpOnly; SameSite=Strict; Path=/"}


def _cookie(text: str, name: str) -> str:
    with suppress(CookieError):
        found = SimpleCookie(text).get(name)
        return found.value if found else ""
    return ""
