"""Pages of runs: real servers on free ports."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.watched import Watch


@pytest.fixture
def watch() -> Iterator[Callable[..., Watch]]:
    """Starts pages, which end with the test."""
    with contextlib.ExitStack() as ends:

        def start(where: Path, *flags: str) -> Watch:
            words = [sys.executable, "-m", "drumline", "watch", str(where), "--port", "0", *flags]
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            ends.callback(end, process)
            assert process.stdout
            ready = process.stdout.readline()
            assert " at http://" in ready, process.stderr and process.stderr.read()
            return Watch(process, ready.split(" at ")[1].strip())

        yield start


def end(process: subprocess.Popen[str]) -> None:
    """It ends in order, and without a word."""
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
