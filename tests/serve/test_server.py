"""The process: whom it serves, what it refuses, and how it ends."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from serve.conftest import Server

from drumline.cli.app import run_command

ENDLESS = {"model": "small", "prompt": "Document 3, line", "max_tokens": 10**8, "temperature": 0}
MANY = ("--max_tokens", str(10**8))
Serve = Callable[..., Server]


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def events(lines: Iterator[str]) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in lines if line)


def test_a_client_that_goes_away_frees_its_slot(serve: Serve) -> None:
    server = serve(*MANY, "--slots", "1")
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.health()["active"] == 1
    wait_until(lambda: server.health()["active"] == 0)
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    clients = [socket.create_connection((host, int(port))) for _ in range(2)]
    for client in clients:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    wait_until(lambda: server.health()["active"] == 1 and server.health()["waiting"] == 1)
    for client in reversed(clients):  # the one that waits first
        client.close()
        wait_until(lambda: server.health()["waiting"] == 0)
    wait_until(lambda: server.health()["active"] == 0)
    with server.client() as client:
        assert client.completions.create(model="small", prompt="Doc", max_tokens=3).usage


def test_sigterm_lets_answers_that_have_begun_end_and_takes_no_others(serve: Serve) -> None:
    server = serve(*MANY, "--slots", "1")
    ask = {**ENDLESS, "max_tokens": 600, "stream": True}
    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json=ask, timeout=60) as first,
        httpx.stream("POST", f"{server.url}/v1/completions", json={**ask, "max_tokens": 2}, timeout=60) as second,
    ):
        lines = events(first.iter_lines())
        next(lines)
        assert server.stop() == 0
        *pieces, done = lines
        assert done == "[DONE]" and json.loads(pieces[-1])["choices"][0]["finish_reason"] == "length"
        assert [*events(second.iter_lines())][-1] == "[DONE]"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert server.process.stdout is not None and "stopping" in server.process.stdout.read()


def test_a_second_signal_stops_it_at_once(serve: Serve) -> None:
    server = serve(*MANY)
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.process.terminate()
        assert server.process.stdout is not None and "stopping" in server.process.stdout.readline()
        assert server.stop() == 0


def test_other_machines_are_served_only_with_a_key_which_every_request_must_have(serve: Serve) -> None:
    server = serve("--host", "0.0.0.0", env={"DRUMLINE_API_KEY": "open sesame"})
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    assert "sesame" not in server.ready
    with server.client(api_key="open sesame") as client:
        assert [model.id for model in client.models.list()] == ["small"]
    for key in ("open sesam", "öffne dich", "-"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        answer = httpx.get(f"{server.url}/v1/models", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.post(f"{server.url}/v1/completions", json=ENDLESS).status_code == 401
    assert httpx.get(server.url).status_code == 200 and server.health()["status"] == "ok"


def test_too_many_and_too_long_requests_are_refused_and_the_others_are_served(serve: Serve) -> None:
    server = serve(*MANY, "--slots", "1", "--max_waiting", "1", "--timeout_s", "2")
    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}) as first,
        server.client() as client,
    ):
        lines = events(first.iter_lines())
        next(lines)
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="small", prompt="Doc", n=2)
        assert full.value.code == "queue_full"
        assert client.completions.create(model="small", prompt="Doc", max_tokens=1).usage  # waits for the slot
        error = json.loads([*lines][-1])["error"]
        assert error["code"] == "timeout" and "2 s" in error["message"]
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(**ENDLESS)  # type: ignore[call-overload]
        assert late.value.status_code == 503 and late.value.code == "timeout"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `drumline serve` says in two lines."""
    capsys.readouterr()
    assert run_command(["serve", *words]) == 1
    problem, fix = capsys.readouterr().err.splitlines()
    assert problem.startswith("error: ") and fix.startswith("  fix: ")
    return f"{problem} {fix}"


def test_what_cannot_be_served_is_said_in_two_lines(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--api_key" in refused(capsys, str(a_run), "--host", "0.0.0.0")
    assert "--slots 1" in refused(capsys, str(a_run), "--slots", "0", "--port", "0")
    assert "--max_tokens 1" in refused(capsys, str(a_run), "--max_tokens", "0", "--port", "0")
    assert "neither a run" in refused(capsys, str(tmp_path), "--port", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = refused(capsys, str(a_run), "--port", str(taken.getsockname()[1]))
        assert "another process" in said and "--port 0" in said
    assert "--host" in refused(capsys, str(a_run), "--host", "no.such.host.invalid", "--api_key", "k")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "drumline.serve.server", raising=False)
    monkeypatch.delattr("drumline.serve.serve_run", raising=False)
    monkeypatch.delattr("drumline.serve.ServeConfig", raising=False)
    assert "pip install 'drumline[serve]'" in refused(capsys, str(a_run))
