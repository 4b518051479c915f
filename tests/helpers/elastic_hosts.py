"""A run on hosts that come and go: how far it is, who takes part, and what may happen to a host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from drumline.report.records import read_metrics
from helpers.hosts import Host, Started

TIMEOUT_S = 120


def wait(condition: Callable[[], bool], what: str, *started: Started) -> float:
    """Seconds until a condition holds."""
    since = time.monotonic()
    while not condition():
        if time.monotonic() - since > TIMEOUT_S:
            output = "\n".join(f"--- {each.host}\n{each.said[-3000:]}" for each in started)
            raise AssertionError(f"not after {TIMEOUT_S} s: {what}\n{output}")
        time.sleep(0.05)
    return time.monotonic() - since


def step(run: Path) -> int:
    return max((record["step"] for record in read_metrics(run / "metrics.jsonl")), default=0)


def goes_on(run: Path, *started: Started) -> float:
    """Seconds until the run has done more steps than ever before."""
    reached = step(run)
    return wait(lambda: step(run) > reached + 3, f"more than {reached} steps", *started)


def rendezvous_count(*started: Started) -> int:
    """How often two ranks began to train together."""
    return sum(each.said.count(" x 2 ranks ") for each in started)


def ranks(host: Host) -> list[int]:
    """The processes on a host that are ranks."""
    rank_pids = []
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True).stdout
    for pid in pids.split():
        with contextlib.suppress(OSError):
            if "/pulse-" in Path(f"/proc/{pid}/maps").read_text():
                rank_pids.append(int(pid))
    return rank_pids


def kill(host: Host) -> None:
    """All at once, as when a host loses its power."""
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def link(host: Host, state: str) -> None:
    """Silent, as a pulled cable: nothing is reset."""
    subprocess.run(["ip", "-n", host.namespace, "link", "set", "eth0", state], check=True)
