"""What a program shows on a terminal."""

import contextlib
import os
import pty
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


def on_terminal(
    words: Sequence[str],
    *,
    start: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
    cwd: Path | None = None,
    stream: str = "stdout",
) -> tuple[str, str]:
    """What a command shows on a terminal of 100 columns, and what it writes to the other of its two streams."""
    ours, theirs = pty.openpty()
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: theirs}
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with start(words, cwd=cwd, env=environ, **streams) as process:
        os.close(theirs)
        shown = b"".join(_chunks(ours))
        other = (process.stderr if stream == "stdout" else process.stdout).read()
    os.close(ours)
    assert process.returncode == 0, other.decode()
    return shown.decode(), other.decode()


def _chunks(descriptor: int) -> Iterator[bytes]:
    with contextlib.suppress(OSError):  # the other side is closed
        while chunk := os.read(descriptor, 1 << 16):
            yield chunk
