"""Ranks that die or hang are named with the first cause and started again, and none outlives its launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers.launchers import rank_process, wait_until_gone
from helpers.warm import Warm

from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED

pytestmark = pytest.mark.needs_shm
TIMEOUT_S = 90
WORK = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from drumline.parallel.heartbeat import own_pulse
from drumline.elastic.launch import start_ranks

def act(kind, rank, step):
    once = f"{kind}-happened"
    if step == 8 and rank == 1 and (kind == "always" or not os.path.exists(once)):
        open(once, "w").close()
        if kind in ("raise", "always"):
            raise ValueError("boom of " + kind)
        while kind == "endless":
            pass
        if kind == "exit":
            os._exit(9)

def work(kind, steps):
    rank, asked = int(os.environ["RANK"]), []
    dist.init_process_group("gloo")
    signal.signal(signal.SIGTERM, lambda signum, frame: asked.append(signum))
    pulse = own_pulse()
    for step in range(steps):
        pulse.at("data", step)
        act(kind, rank, step)
        pulse.at("compute", step)
        time.sleep(0.01)
        pulse.at("exchange", step)
        stop = torch.tensor([float(bool(asked))])
        dist.all_reduce(stop)
        if rank == 0:
            print("step", step, flush=True)
        if stop:
            if rank == 0:
                time.sleep(0.5)
                print("saved", flush=True)
            sys.exit(75)
    pulse.stop()

if __name__ == "__main__":
    restarts = None if sys.argv[2] == "None" else int(sys.argv[2])
    sys.exit(start_ranks(work, (sys.argv[1], int(sys.argv[3])), nproc=2, max_restarts=restarts, hang_timeout=2))
"""


class Launcher:
    """A launcher with two ranks that count steps together."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors

    @property
    def said(self) -> str:
        return self._errors.read_text()

    def until(self, step: int) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == f"step {step}":
                return
        raise AssertionError(f"ended with {self.process.wait(TIMEOUT_S)} before step {step}:\n{self.said}")

    def rank(self, number: int) -> psutil.Process:
        """The process that is this rank now."""
        return rank_process(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    (tmp_path / "work.py").write_text(WORK)
    started: list[subprocess.Popen[str]] = []

    def start(kind: str, *, restarts: int | None = None, steps: int = 100_000, cold: bool = False) -> Launcher:
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
        with (tmp_path / "errors").open("w") as errors:
            process = Warm(
                [sys.executable, "work.py", kind, str(restarts), str(steps)],
                cwd=tmp_path,
                env={**clean, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cold=cold,
            )
        started.append(process)
        return Launcher(process, tmp_path / "errors")

    yield start
    for process in started:
        process.kill()
        process.communicate()
        for folder in Path("/dev/shm").glob(f"drumline-{process.pid}-*"):
            shutil.rmtree(folder)


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_rank_is_the_one_named_and_the_run_goes_on(launch: Callable[..., Launcher], number: int) -> None:
    launcher = launch("quiet", steps=300)
    launcher.until(20)
    victim = launcher.rank(number)
    victim.kill()
    launcher.until(10)
    assert launcher.end()[0] == 0
    first = launcher.said.splitlines()[0]
    assert first.startswith(f"rank {number} on ") and f"(process {victim.pid}) was killed by SIGKILL at step " in first
    assert first.endswith("; restarting (1)") and "onnection" not in launcher.said


def test_an_exception_shows_its_own_traceback_and_not_what_followed_on_other_ranks(
    launch: Callable[..., Launcher],
) -> None:
    launcher = launch("raise", restarts=0)
    assert launcher.end()[0] == EXIT_FAILED
    said = launcher.said
    assert said.startswith("error: rank 1 on ") and "failed with ValueError: boom of raise at step 8" in said
    assert said.count("Traceback") == 1 and 'raise ValueError("boom of " + kind)' in said
    assert "Connection closed" not in said and "  rank 0 (process " in said


def test_three_crashes_without_a_step_more_end_the_run_with_the_first_cause(launch: Callable[..., Launcher]) -> None:
    launcher = launch("always")
    assert launcher.end()[0] == EXIT_FAILED
    said = launcher.said
    assert said.count("restarting") == 2 and "boom of always at step 8 (3 crashes in a row" in said
    first = said.splitlines()[0].partition(" failed")[0]
    assert f"error: {first} failed" in said


def test_an_exit_code_that_nobody_gives_is_a_crash(launch: Callable[..., Launcher]) -> None:
    launcher = launch("exit", steps=20)
    assert launcher.end()[0] == 0
    assert "exited with code 9 at step 8; restarting (1)" in launcher.said


def test_a_frozen_rank_is_named_and_the_run_goes_on(launch: Callable[..., Launcher]) -> None:
    launcher = launch("quiet", steps=300)
    launcher.until(20)
    launcher.rank(1).suspend()
    launcher.until(10)
    assert launcher.end()[0] == 0
    assert launcher.said.startswith("rank 1 on ") and "was stopped (SIGSTOP) for " in launcher.said


def test_an_endless_loop_is_named_with_its_stack(launch: Callable[..., Launcher]) -> None:
    launcher = launch("endless", restarts=0)
    assert launcher.end()[0] == EXIT_FAILED
    said = launcher.said
    assert said.startswith("error: rank 1 on ") and "s in data at step 8" in said
    of_rank_1 = said.partition("\n  rank 1:\n")[2]
    assert " in act" in of_rank_1 and "in all_reduce" in said.partition("\n  rank 1:\n")[0]
    assert "_keep_ticking" not in said and "multiprocessing" not in said


def test_nothing_outlives_a_launcher_that_is_killed(launch: Callable[..., Launcher]) -> None:
    launcher = launch("quiet")
    launcher.until(5)
    children = psutil.Process(launcher.process.pid).children(recursive=True)
    assert len(children) >= 3
    launcher.process.kill()
    wait_until_gone(children)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_launcher_lets_the_ranks_save_and_stop(
    launch: Callable[..., Launcher], signum: signal.Signals
) -> None:
    launcher = launch("quiet")
    launcher.until(5)
    children = psutil.Process(launcher.process.pid).children(recursive=True)
    launcher.process.send_signal(signum)
    code, out = launcher.end()
    assert code == EXIT_STOPPED and out.endswith("saved\n") and launcher.said == ""
    wait_until_gone(children)


def test_a_second_signal_ends_the_ranks_at_once(launch: Callable[..., Launcher]) -> None:
    launcher = launch("quiet")
    launcher.until(5)
    children = psutil.Process(launcher.process.pid).children(recursive=True)
    launcher.rank(1).suspend()  # so that the first signal cannot be followed
    launcher.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end()[0] == EXIT_INTERRUPTED
    wait_until_gone(children)


def test_a_signal_before_the_ranks_run_ends_all_without_a_traceback(launch: Callable[..., Launcher]) -> None:
    launcher = launch("quiet", cold=True)  # or they would run too soon
    me = psutil.Process(launcher.process.pid)
    while not any("multiprocessing.forkserver" in " ".join(child.cmdline()) for child in me.children()):
        time.sleep(0.01)
    children = me.children(recursive=True)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end()[0] == EXIT_INTERRUPTED
    assert launcher.said == ""
    wait_until_gone(children)
