"""The routes, and who may use them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from drumline.network import is_loopback
from drumline.serve.answers import Answer
from drumline.serve.jobs import Job, Service
from drumline.serve.requests import ApiError, Wanted, parse

_PAGE = Path(__file__).with_name("page.html")
Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(service: Service, *, api_key: str | None) -> Starlette:
    """The ASGI application. api_key: what clients must send; None: any client of this machine may use it."""
    page, policy = _page()

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            _check_host(request, api_key)
            _check_key(request, api_key)
            return await endpoint(request)

        return checked

    async def home(request: Request) -> Response:
        _check_host(request, api_key)
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page, headers=headers)

    async def health(request: Request) -> Response:
        engine = service.engine
        status = "draining" if service.draining else "ok"
        slots = {"active": engine.active, "total": engine.slots.count, "waiting": engine.waiting}
        return JSONResponse({"status": status, **slots}, status_code=503 if service.draining else 200)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        if request.path_params["name"] != service.name:
            raise ApiError(404, f"this server has only {service.name!r}", param="model", code="model_not_found")
        return JSONResponse(_model(service))

    async def completions(request: Request) -> Response:
        return await _complete(service, request, is_chat=False)

    async def chat(request: Request) -> Response:
        return await _complete(service, request, is_chat=True)

    return Starlette(
        routes=[
            Route("/", home),
            Route("/health", health),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/v1/completions", guarded(completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
        ],
        exception_handlers={ApiError: _refused, HTTPException: _refused, Exception: _failed},
    )


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "drumline",
        "context": service.run.context,
        "max_tokens": service.limits.max_tokens,
    }


async def _complete(service: Service, request: Request, *, is_chat: bool) -> Response:
    body = await _body(request, most_bytes=service.limits.max_body_bytes)
    wanted = parse(body, is_chat=is_chat, model=service.name, most_tokens=service.limits.max_tokens)
    prompts = await asyncio.to_thread(service.encode, wanted)  # a long text would keep the others waiting
    job = Job(service, wanted, prompts)
    answer = Answer(
        wanted, service.run.tokenizer, model=service.name, prompt_tokens=sum(len(prompt) for prompt in prompts)
    )
    if wanted.stream:
        return _Events(job, answer, wanted)
    try:
        return JSONResponse(await _unless_gone(request, _whole(job, answer)))
    finally:
        job.cancel()


async def _whole(job: Job, answer: Answer) -> dict[str, Any]:
    return answer.whole([piece async for piece in job.pieces()])


async def _unless_gone(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The result of `work`; ClientDisconnect as soon as nobody waits for it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


class _Events(StreamingResponse):
    """An answer as server-sent events. A client that goes away frees its slots."""

    def __init__(self, job: Job, answer: Answer, wanted: Wanted) -> None:
        self._job = job
        super().__init__(_events(job, answer, wanted), media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-store"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _events(job: Job, answer: Answer, wanted: Wanted) -> AsyncIterator[str]:
    try:
        async for piece in job.pieces():
            for chunk in answer.chunks(piece):
                yield _event(chunk)
        if wanted.includes_usage:
            yield _event(answer.usage_chunk())
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield _event(error.body())


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _body(request: Request, *, most_bytes: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Other kinds are what a page of any other site can send without asking.
        raise ApiError(415, "send JSON, with the header Content-Type: application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            raise ApiError(413, f"the body is larger than {most_bytes} bytes", code="body_too_large")
    return body


def _check_host(request: Request, api_key: str | None) -> None:
    """Without a key, only names of this machine: another site's name can be made to lead here."""
    host = request.headers.get("host", "")
    name = re.sub(r":\d+$", "", host)
    if api_key is None and not is_loopback(name):
        raise ApiError(403, f"{host!r} is not a name of this machine", code="host_not_allowed")


def _check_key(request: Request, api_key: str | None) -> None:
    given = request.headers.get("authorization", "")
    if api_key is not None and not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
        raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        path = request.url.path
        what = f"there is no {path} here" if error.status_code == 404 else f"{path} does not take {request.method}"
        error = ApiError(error.status_code, what)
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status in (429, 503) else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _failed(request: Request, error: Exception) -> Response:
    """A bug: the log has its traceback."""
    return JSONResponse(ApiError(500, "the server failed; its log says why").body(), status_code=500)


def _page() -> tuple[str, str]:
    """The page, and the policy that lets it load nothing and run nothing but its own script."""
    page = _PAGE.read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        match = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert match
        return base64.b64encode(hashlib.sha256(match[1].encode()).digest()).decode()

    policy = f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'"
    return (
        page,
        f"{policy}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    )
