"""What a launcher has started: which process is which rank, and whether any is left."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

_GONE_S = 20


def rank_process(launcher_pid: int, rank: int) -> psutil.Process:
    """The process that is this rank now: the one that writes its heartbeat."""
    for child in psutil.Process(launcher_pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(file.path.endswith(f"/pulse-{rank}") for file in child.memory_maps()):
                return child
    raise AssertionError(f"no process is rank {rank}")


def wait_until_it_catches(pid: int, signum: int) -> None:
    """Until a process has a handler of its own for a signal."""
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status").read_text()
        if int(status.partition("SigCgt:")[2].split()[0], 16) >> (signum - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} does not catch signal {signum}")


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + _GONE_S
    while _running(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _running(processes) == []


def _running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run: what nobody has reaped yet is dead all the same."""
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
