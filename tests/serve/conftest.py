"""A small run, and servers of it: real processes on free ports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.small import small
from helpers.warm import Warm
from openai import OpenAI

from drumline.cli.app import run_command


@dataclass
class Server:
    process: Warm
    url: str
    ready: str

    def client(self, **more: Any) -> OpenAI:
        return OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 60, **more})

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health") as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def stop(self) -> int:
        """Ask it to stop; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return int(self.process.wait(timeout=60))


@pytest.fixture(scope="session")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned enough for its likeliest token to be clearly the likeliest."""
    folder = tmp_path_factory.mktemp("served")
    text = folder / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.txt").write_text(
            "".join(f"Document {number}, line {line}: 鼓 rolls. " for line in range(40))
        )
    flags = (
        f"--total_steps 40 --context 64 --d_model 32 --lr 0.02 --train_data_path {text} --run_dir {folder / 'small'}"
    )
    assert run_command(["train", *small(*flags.split())]) == 0
    return folder / "small"


@contextlib.contextmanager
def serving(run: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    command = [sys.executable, "-m", "drumline", "serve", str(run), "--port", "0", "--device", "cpu", *flags]
    process = Warm(command, stdout=subprocess.PIPE, env={**os.environ, **(env or {})}, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert " at http://" in ready, ready
        yield Server(process, ready.split(" at ")[1].split(",")[0], ready)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def serve(a_run: Path) -> Iterator[Callable[..., Server]]:
    """Start a server of that run with more flags."""
    with contextlib.ExitStack() as stack:
        yield lambda *flags, **more: stack.enter_context(serving(a_run, *flags, **more))


@pytest.fixture(scope="module")
def server(a_run: Path) -> Iterator[Server]:
    """A server that the tests of a module share."""
    with serving(a_run, "--slots", "6") as running:
        yield running
