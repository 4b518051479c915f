"""The page of a folder of runs: served on this machine, from files alone."""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from drumline.network import Endpoint, bound, is_loopback
from drumline.signals import STOP_SIGNALS
from drumline.watch.http import Gate, Request, Response, refused, serve_connection
from drumline.watch.library import Library
from drumline.watch.source import AXES, RunSource, to_json

PORT = 6240
_PORTS = 20
"""So many are tried after the first one, if the user has not chosen one."""
_POLL_S, _BEAT_S = 0.5, 15.0
_READ_S = 0.25
"""How long an answer waits for a long file: the rest is read while the page shows the beginning."""
_MOST_CLIENTS = 512
_MOST_SHOWN = 32
"""Runs on one page at the same time."""
PAGE = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_JSON = "application/json"
_WAITING = 256
"""Connections that may wait to be accepted: all pages come back at once after a restart."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Where to serve. port None: the first free one from 6240 on."""

    host: str = "127.0.0.1"
    port: int | None = None

    @property
    def is_local(self) -> bool:
        return is_loopback(self.host)


def serve_page(where: Path, config: WatchConfig, *, say: Callable[[str], None]) -> None:
    """Serve until a signal comes. say: gets the address when the page is there."""
    library = Library(where)
    ports = [*range(PORT, PORT + _PORTS), 0] if config.port is None else [config.port]
    listener = bound(config.host, *ports)
    listener.listen(_WAITING)
    token = None if config.is_local else secrets.token_urlsafe(24)
    asyncio.run(Server(library, host=config.host, token=token).run(listener, say=say))


class Server:
    """Routes, and what all pages share: each file is read once, and each answer made once."""

    def __init__(self, library: Library, *, host: str, token: str | None) -> None:
        self._library, self._host, self._token = library, host, token
        self._gate = Gate(token)
        self._files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in _TYPES}
        self._asked: dict[str, float] = {}
        """When a run was last asked for: only those are read on."""
        self._made: dict[tuple[Any, ...], tuple[Any, bytes]] = {}
        self._making: dict[tuple[Any, ...], asyncio.Lock] = {}
        self._changed = asyncio.Event()
        """Set once something has changed; then another one takes its place."""
        self._clients = 0
        self._names: list[str] = []

    async def run(self, listener: socket.socket, *, say: Callable[[str], None]) -> None:
        """Until a stop signal."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, stop.set)
        port = listener.getsockname()[1]
        self._gate.cookie = f"drumline_watch_{port}"  # cookies of one host are the same for all its ports
        connect = partial(serve_connection, answer=self.answer)
        server = await asyncio.start_server(connect, sock=listener, limit=16 << 10)
        polling = asyncio.create_task(self._poll())
        suffix = f"/?token={self._token}" if self._token else ""
        say(f"watching {self._library.where} at http://{Endpoint(self._host, port)}{suffix}")
        try:
            await stop.wait()
        finally:
            polling.cancel()
            server.close()

    async def answer(self, request: Request) -> Response:
        """One request."""
        if refusal := self._gate.check(request):
            return refusal
        path = request.path
        name = "index.html" if path == "/" else path.removeprefix("/page/")
        if name in self._files:
            kind = f"{_TYPES[Path(name).suffix]}; charset=utf-8"
            return Response(self._files[name], kind, headers=self._gate.remember(request))
        if path == "/api/runs":
            names = await asyncio.to_thread(self._library.names)
            return await self._cached(("runs",), (names, int(time.monotonic())), self._library.runs)
        if path == "/api/stream":
            return self._stream(request)
        if path in ("/api/run", "/api/curves", "/api/ranks"):
            return await self._of_run(path.rpartition("/")[2], request)
        return refused(HTTPStatus.NOT_FOUND, "there is nothing at this address")

    async def _of_run(self, what: str, request: Request) -> Response:
        source = self._library.source(request.first("run"))
        if source is None:
            return refused(HTTPStatus.NOT_FOUND, "there is no run of this name")
        if self._asked.get(source.name, 0.0) < time.monotonic() - 2 * _POLL_S:
            await asyncio.to_thread(source.refresh, budget_s=_READ_S)
        self._asked[source.name] = time.monotonic()
        key: tuple[Any, ...] = (what, source.name)
        version: Any = source.version()[what if what in ("ranks", "curves") else "run"]
        if what == "curves":
            axis, low, high = request.first("axis", "step"), request.first("low"), request.first("high")
            buckets = min(4000, max(10, int(_float(request.first("buckets"), 600))))
            view: dict[str, Any] = {"axis": axis if axis in AXES else "step", "buckets": buckets}
            view |= {"low": _float(low, -math.inf), "high": _float(high, math.inf)}
            return await self._cached((*key, *view.values()), version, partial(source.curves, **view))
        if what == "ranks":
            return await self._cached(key, version, partial(ranks_of, source))
        running = int(time.monotonic()) if source.state() in ("running", "restarting") else 0
        return await self._cached(key, (version, running), source.as_json)

    async def _cached(self, key: tuple[Any, ...], version: Any, make: Callable[[], Any]) -> Response:
        """Made in a thread, and once for all pages that ask for the same."""
        lock = self._making.setdefault(key, asyncio.Lock())
        async with lock:
            known = self._made.pop(key, None)
            if known is None or known[0] != version:
                known = (version, await asyncio.to_thread(lambda: to_json(make())))
            self._made[key] = known  # the newest last
        while len(self._made) > 64:
            oldest = next(iter(self._made))
            self._made.pop(oldest)
            self._making.pop(oldest, None)
        return Response(known[1], _JSON)

    def _stream(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.query.get("run", [])))[:_MOST_SHOWN]
        sources = [source for name in names if (source := self._library.source(name))]
        if self._clients >= _MOST_CLIENTS:
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, "too many pages are open")
        axis = request.first("axis", "step")
        at = [[int(_float(each, -1)) for each in text.split(",")] for text in request.query.get("at", [])]
        at = [each if len(each) == 3 else [-1, 0, 0] for each in at] + [[-1, 0, 0]] * len(sources)
        events = self._events(sources, axis if axis in AXES else "step", at[: len(sources)])
        return Response(type="text/event-stream", events=events)

    async def _events(self, sources: list[RunSource], axis: str, at: list[list[int]]) -> AsyncIterator[bytes]:
        """What has changed since the page asked for its curves (`at`), as it changes."""
        self._clients += 1
        try:
            seen: list[dict[str, Any]] = [{"curves": rows} for rows in at]
            listed: str | None = None
            yield b"retry: 1000\n\n"
            while True:
                changed = self._changed
                for source, before in zip(sources, seen, strict=True):
                    self._asked[source.name] = time.monotonic()
                    for event in await self._news(source, before, axis):
                        yield event
                if listed != (now := ",".join(self._names)):
                    if listed is not None:
                        yield b"event: runs\ndata: {}\n\n"
                    listed = now
                try:
                    async with asyncio.timeout(_BEAT_S):  # wait_for of Python 3.11 may lose that it is cancelled
                        await changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._clients -= 1

    async def _news(self, source: RunSource, before: dict[str, Any], axis: str) -> list[bytes]:
        version, news = source.version(), []
        if before["curves"] != version["curves"]:
            key = ("tail", source.name, axis, *before["curves"])
            made = await self._cached(key, version["curves"], partial(source.tail, before["curves"], axis=axis))
            news.append(_event("curves", made.body, source.name))
        for what in ("ranks", "run"):
            if what in before and before[what] != version[what]:
                news.append(_event(what, b"null", source.name))
        before.update(version)
        return news

    async def _poll(self) -> None:
        """Read on what pages show, and wake those that wait."""
        while True:
            before = {name: source.version() for name, source in self._shown().items()}
            names = self._names
            for source in self._shown().values():
                await asyncio.to_thread(source.refresh, budget_s=_READ_S)
            if self._clients:
                self._names = await asyncio.to_thread(self._library.names)
            after = {name: source.version() for name, source in self._shown().items()}
            if after != before or names != self._names:
                self._changed.set()
                self._changed = asyncio.Event()
            is_behind = any(source.left_bytes for source in self._shown().values())
            await asyncio.sleep(_POLL_S / 25 if is_behind else _POLL_S)

    def _shown(self) -> dict[str, RunSource]:
        recent = time.monotonic() - 2 * _BEAT_S
        names = [name for name, when in self._asked.items() if when > recent]
        return {name: source for name in names if (source := self._library.source(name))}


def _event(name: str, data: bytes, run: str) -> bytes:
    return b'event: %s\ndata: {"run":%s,"tail":%s}\n\n' % (name.encode(), to_json(run), data)


def ranks_of(source: RunSource) -> dict[str, Any]:
    """What the page draws of the ranks of a run."""
    with source.lock:
        hosts = source.started().get("hosts")
        return {**source.ranks.as_json(), "run": source.name, "hosts": hosts if isinstance(hosts, list) else []}


def _float(text: str, default: float) -> float:
    try:
        number = float(text)
    except ValueError:
        return default
    return number if math.isfinite(number) else default
