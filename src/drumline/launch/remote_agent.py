"""What `drumline launch` starts on each host: one command, which stops when the launcher says so or is gone.

The command is sent as one line of JSON on stdin, so that none of it, secrets in particular, shows up in a command line
or a log. After that, a line TERM asks the command to stop, KILL kills it, and any other line is a heartbeat. If stdin
closes, or is silent for too long because the connection broke, the command is asked to stop. Replies are lines on
stdout that start with MARK; the last one has the exit code and the last error that the command reported. All other
output is the command's own. No torch here: it must start fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import drumline
from drumline.elastic import die_with_parent
from drumline.errors import EXIT_INTERRUPTED, EXIT_USER, DrumlineError
from drumline.files import EVENTS
from drumline.signals import counting

MARK = "\x1edrumline "
"""Start of a line that is meant for the launcher."""
_POLL_S, _TIDY_S, _SAVE_S = 0.1, 5.0, 660.0
"""How long leftover processes may take to exit; and how long the command may take to save and stop."""
_CHECKOUT = Path(drumline.__file__).parents[2]
"""The checkout that drumline was installed from; empty if it was not installed from one."""
_TRIES = 3
_SUBREAPER = 36


def main() -> int:
    """Run the command given on stdin, and return its exit code."""
    first, _, rest = _first_line().partition(b"\n")
    if not first:
        return EXIT_INTERRUPTED  # the launcher was gone before it sent a command
    order = json.loads(first)
    if "meeting_host" in order:
        answer(facts(order["cwd"], order["meeting_host"]))
    if "argv" not in order:
        return 0
    _adopt_orphans()
    with counting() as asked:
        answer({"started": True})
        with _events_file() as events:
            code = _run(order, rest, asked, events)
            error = _last_error(events)
        answer({"code": code, "error": error} if error else {"code": code})
    return code


@contextlib.contextmanager
def _events_file() -> Iterator[str]:
    """A file for the command's events; empty if there is no space for one, which is no reason not to run."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="drumline-agent-", ignore_cleanup_errors=True)
        events = Path(folder.name) / "events"
        events.touch()
    except OSError:
        yield ""
        return
    with folder:
        yield str(events)


def _last_error(events: str) -> dict[str, Any] | None:
    """The last error that the command reported, and how many seconds ago."""
    error = None
    with contextlib.suppress(OSError):
        for line in Path(events or os.devnull).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that a full disk cut off
                event = json.loads(line)
                error = event if event["event"] == "error" else error
    return error and {**error, "ago_s": time.time() - error["time"]}


def _run(order: dict[str, Any], rest: bytes, asked: list[int], events: str) -> int:
    """Start the command and wait for it to exit."""
    os.environ |= {**order["environ"], EVENTS: events}
    try:
        process = subprocess.Popen(
            order["argv"],
            cwd=order["cwd"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (there are no threads)
        )
    except OSError as error:
        from drumline.report import tell

        tell(
            DrumlineError(
                f"cannot start {order['argv'][0]} in {order['cwd']}: {error.strerror}",
                fix="give a --python and a --workdir that exist on every host",
            )
        )
        return EXIT_USER
    return watch(process, asked, rest, silent_s=order["silent_s"])


def facts(cwd: str, rendezvous_host: str) -> dict[str, Any]:
    """Facts about this host that may prevent a run."""
    try:
        addresses = socket.getaddrinfo(rendezvous_host, None, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": _version("torch"),
            "drumline": drumline.__version__,
        },
        "checkout": str(_CHECKOUT) if (_CHECKOUT / "constraints.txt").is_file() else None,
        "cwd": Path(cwd).is_dir(),
        "meeting_addresses": sorted({str(each[4][0]) for each in addresses}),
    }


def watch(process: subprocess.Popen[bytes], asked: list[int], heard: bytes, *, silent_s: float) -> int:
    """Wait until the command and everything it started have exited; returns its exit code, as a shell would.

    asked:    filled by signal handlers
    heard:    what was already read from stdin
    silent_s: how long the launcher may be silent
    """
    heard_s, deadline_s, patience_s = time.monotonic(), float("inf"), _TIDY_S
    listening = True
    while process.poll() is None:
        ready = select.select([0] if listening else [], [], [], _POLL_S)[0]
        if ready:
            chunk = os.read(0, 4096)
            heard, heard_s, listening = heard + chunk, time.monotonic(), bool(chunk)
        *lines, heard = heard.split(b"\n")
        gone = not listening or time.monotonic() - heard_s > silent_s
        if deadline_s == float("inf") and (asked or gone or b"TERM" in lines):
            process.terminate()  # only once: a second signal would stop it without saving
            deadline_s = time.monotonic() + _SAVE_S
        if b"KILL" in lines or time.monotonic() > deadline_s:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            patience_s = 0.0
    _end_the_rest(patience_s)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def answer(what: dict[str, Any]) -> None:
    """Send a reply to the launcher, if it is still there."""
    try:
        sys.stdout.write(f"{MARK}{json.dumps(what)}\n")
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's final flush would print an error


def _first_line() -> bytes:
    """Read without Python's buffering, which would hide data from `select`."""
    got = b""
    while b"\n" not in got and (chunk := os.read(0, 65536)):
        got += chunk
    return got


def _version(package: str) -> str:
    try:
        return metadata.version(package)  # without importing it, which takes seconds
    except metadata.PackageNotFoundError:
        return "none"


def _adopt_orphans() -> None:
    """Become the subreaper: orphans of the command become children of this process, which waits for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def _end_the_rest(patience_s: float) -> None:
    """Kill what the command left behind, after a moment for cleanup."""
    me = psutil.Process()
    _, left = psutil.wait_procs(me.children(recursive=True), timeout=patience_s)
    for _ in range(_TRIES):  # killed processes may have had children of their own
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=_TIDY_S)
        left = me.children(recursive=True)


if __name__ == "__main__":
    sys.exit(main())
