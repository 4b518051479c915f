"""The server of the page: who may ask, for what, and what 100 pages at the same time get."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.watched import Watch, append, make_run, step_record

from drumline.cli.app import run_command

Start = Callable[..., Watch]


def test_a_folder_of_runs_and_a_run_alone_are_served(tmp_path: Path, watch: Start) -> None:
    make_run(tmp_path / "runs/a", steps=100)
    make_run(tmp_path / "runs/b", steps=100)
    assert [each["run"] for each in watch(tmp_path / "runs").json("/api/runs")] == ["a", "b"]
    alone = watch(tmp_path / "runs/b")
    assert [each["run"] for each in alone.json("/api/runs")] == ["b"]
    assert alone.json("/api/curves?run=b")["curves"]["loss"]["x"][-1] == 100


def test_nothing_outside_of_the_folder_is_served(tmp_path: Path, watch: Start) -> None:
    make_run(tmp_path / "secret", steps=20)
    make_run(tmp_path / "runs/a", steps=20)
    (tmp_path / "runs/link").symlink_to(tmp_path / "secret")
    page = watch(tmp_path / "runs")
    assert [each["run"] for each in page.json("/api/runs")] == ["a"]
    runs = ["../secret", "link", "..", "", "a/../../secret", "%2e%2e%2fsecret", str(tmp_path / "secret"), "a%00"]
    for path in [f"/api/run?run={run}" for run in runs]:
        assert page.ask(path)[0] == 404, path
    files = ["server.py", "../server.py", "%2e%2e/server.py", "..%2fserver.py", "/etc/passwd", "uplot.LICENSE"]
    for path in [*(f"/page/{name}" for name in files), "/../server.py", "/etc/passwd", "/runs/a/config.toml"]:
        assert page.ask(path)[0] == 404, path


def test_a_name_that_points_to_this_machine_is_refused(tmp_path: Path, watch: Start) -> None:
    page = watch(tmp_path)
    for host in ("evil.example", "evil.example:6240", "127.0.0.1.evil.example", "", "10.0.0.1"):
        assert page.ask("/api/runs", Host=host)[0] == 403, host
    for host in (f"127.0.0.1:{page.port}", "localhost:9999", "localhost", "[::1]:80", "[::1]"):
        assert page.ask("/api/runs", Host=host)[0] == 200, host


def test_another_host_needs_the_token_of_the_address(tmp_path: Path, watch: Start) -> None:
    page = watch(tmp_path, "--host", "0.0.0.0")
    token = page.url.partition("token=")[2]
    assert len(token) >= 32
    for path in ("/", "/api/runs", "/page/app.js", f"/?token={token[:-1]}", "/?token=", "/?token=%ff"):
        assert page.ask(path)[0] == 403, path
    status, headers, _ = page.ask(f"/?token={token}")
    cookie = headers["set-cookie"]
    assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert page.ask("/api/runs", Cookie=cookie.partition(";")[0])[0] == 200
    assert page.ask("/api/runs", Cookie=cookie.partition("=")[0] + "=wrong")[0] == 403


def test_pages_may_load_nothing_but_their_own_files(tmp_path: Path, watch: Start) -> None:
    status, headers, body = watch(tmp_path).ask("/")
    rules = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in rules and "unsafe" not in rules and "script-src 'self'" in rules
    assert headers["x-content-type-options"] == "nosniff" and b"<script>" not in body and b"style=" not in body


@pytest.mark.parametrize(
    "said",
    [
        b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ],
)
def test_what_is_no_request_to_read_is_refused(tmp_path: Path, watch: Start, said: bytes) -> None:
    page = watch(tmp_path)
    address = ("127.0.0.1", page.port)
    for each in (said + b"\r\n\r\n", b"GET /" + b"x" * 40_000):
        with socket.create_connection(address, timeout=30) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(each)
            assert connection.recv(100).split(b" ")[1] in (b"400", b"405")
    assert page.json("/api/runs") == []


def test_a_hundred_pages_get_every_new_record(tmp_path: Path, watch: Start) -> None:
    run = make_run(tmp_path / "run", steps=50)
    page = watch(run)
    at = ",".join(map(str, page.json("/api/curves?run=run")["at"]))
    with contextlib.ExitStack() as ends:
        streams = []
        for _ in range(100):
            connection = ends.enter_context(
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=60))
            )
            connection.request("GET", f"/api/stream?run=run&at={at}")
            streams.append(connection.getresponse())
        append(run / "metrics.jsonl", step_record(60, loss=1.25))
        for stream in streams:
            lines = iter(stream.readline, b"")
            next(line for line in lines if line == b"event: curves\n")  # others tell that time has passed
            message = json.loads(next(lines).removeprefix(b"data: "))
            assert message["tail"]["curves"]["loss"] == {"x": [60.0], "y": [1.25]}


def test_a_page_whose_records_were_taken_back_asks_again(tmp_path: Path, watch: Start) -> None:
    run = make_run(tmp_path / "run", steps=50)
    page = watch(run)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)) as connection:
        connection.request(
            "GET", "/api/stream?run=run&at=" + ",".join(map(str, page.json("/api/curves?run=run")["at"]))
        )
        stream = connection.getresponse()
        (run / "metrics.jsonl").write_text("")
        append(run / "metrics.jsonl", step_record(10))
        lines = iter(stream.readline, b"")
        next(line for line in lines if line == b"event: curves\n")
        assert json.loads(next(lines).removeprefix(b"data: ")) == {"run": "run", "tail": None}
    assert page.json("/api/curves?run=run")["curves"]["loss"]["x"] == [10.0]


def test_ctrl_c_ends_the_page_with_0(tmp_path: Path, watch: Start) -> None:
    page = watch(tmp_path)
    page.process.send_signal(signal.SIGINT)
    assert page.process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["watch", "missing"], "missing does not exist"),
        (["watch", "file"], "file is no folder"),
        (["watch", ".", "--port", "99999"], "99999 is no port"),
        (["watch", ".", "--host", "no.such.host.invalid"], "cannot serve at no.such.host.invalid"),
        (["report", "missing"], "missing does not exist"),
        (["report", "."], "is no run folder"),
        (["report", "run", "-o", "."], "is a folder"),
        (["report", "run", "-o", "file/x.html"], "cannot write file/x.html"),
    ],
)
def test_wrong_input_is_told_in_two_lines(tmp_path: Path, words: list[str], problem: str) -> None:
    (tmp_path / "file").write_text("")
    make_run(tmp_path / "run", steps=20)
    done = subprocess.run(
        [sys.executable, "-m", "drumline", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    first, second = done.stderr.splitlines()
    assert done.returncode == 1 and problem in first and second.startswith("  fix: ")


def test_the_page_and_the_report_import_no_torch(tmp_path: Path) -> None:
    make_run(tmp_path / "run", steps=20)
    code = """
import sys
from drumline.cli import run_command
assert run_command(["report", "run"]) == 0
import drumline.watch.server
assert not {"torch", "matplotlib", "starlette"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "run/report.html").is_file()


def test_a_page_that_was_started_with_a_run_ends_with_it(tmp_path: Path) -> None:
    code = """
import sys
from drumline.watch import start_page
assert start_page("run")
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    trainer = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    port = int(trainer.stdout.readline().rpartition(":")[2])
    page = Watch(trainer, f"http://127.0.0.1:{port}")
    assert page.json("/api/runs") == []
    make_run(tmp_path / "run", steps=20)
    assert [each["run"] for each in page.json("/api/runs")] == ["run"]
    trainer.kill()
    assert trainer.stdout.read() == ""  # the page has the other end of it, until it ends
    trainer.wait()


def test_only_one_rank_starts_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from drumline.watch import start_page

    for name, rank in (("RANK", "1"), ("SLURM_PROCID", "3")):
        with monkeypatch.context() as patched:
            patched.setenv(name, rank)
            assert start_page("run") is None


def test_the_curves_of_a_run_are_a_picture_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", steps=50)
    assert run_command(["report", str(run), "--format", "png"]) == 0
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG") and "report.png" in capsys.readouterr().out
    assert run_command(["report", str(run), "--format", "png", "-o", str(run)]) == 1
    assert "is a folder" in capsys.readouterr().err
