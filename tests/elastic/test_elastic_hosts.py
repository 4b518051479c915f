"""Hosts that come, go, fall silent or lose their leader: the run goes on with those that are there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.hosts import Host, Started, two_hosts
from helpers.small import small

from drumline.report.records import read_metrics

pytestmark = pytest.mark.needs("hosts")

TIMEOUT_S = 120
ENDPOINT = ("--rdzv_endpoint", "host-a:29400")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as pair:
        yield pair


@pytest.fixture
def train(tmp_path: Path, text: Path) -> Callable[..., Started]:
    """Start `drumline train` on a host, as one of up to two."""
    more = ["--save_every", "20", "--eval_every", "100000", "--run_dir", str(tmp_path / "run"), "--nproc", "1"]

    def start(host: Host, *extra: str, nnodes: str = "1:2", steps: int = 100_000) -> Started:
        flags = small("--train_data_path", str(text), "--global_batch_size", "16", "--total_steps", str(steps))
        command = [sys.executable, "-m", "drumline", "train", *flags, *more, "--nnodes", nnodes, *extra]
        return host.start(command, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})

    return start


def wait(condition: Callable[[], bool], what: str, *started: Started) -> float:
    """Seconds until a condition holds."""
    since = time.monotonic()
    while not condition():
        if time.monotonic() - since > TIMEOUT_S:
            told = "\n".join(f"--- {each.host}\n{each.said[-3000:]}" for each in started)
            raise AssertionError(f"not after {TIMEOUT_S} s: {what}\n{told}")
        time.sleep(0.05)
    return time.monotonic() - since


def step(run: Path) -> int:
    return max((record["step"] for record in read_metrics(run / "metrics.jsonl")), default=0)


def goes_on(run: Path, *started: Started) -> float:
    """Seconds until the run has done more steps than ever before."""
    reached = step(run)
    return wait(lambda: step(run) > reached + 3, f"more than {reached} steps", *started)


def meetings(*started: Started) -> int:
    """How often two ranks began to train together."""
    return sum(each.said.count(" x 2 ranks ") for each in started)


def ranks(host: Host) -> list[int]:
    """The processes on a host that are ranks."""
    found = []
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True).stdout
    for pid in pids.split():
        with contextlib.suppress(OSError):
            if "/pulse-" in Path(f"/proc/{pid}/maps").read_text():
                found.append(int(pid))
    return found


def kill(host: Host) -> None:
    """All at once, as when a host loses its power."""
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def link(host: Host, state: str) -> None:
    """Silent, as a pulled cable: nothing is reset."""
    subprocess.run(["ip", "-n", host.namespace, "link", "set", "eth0", state], check=True)


def together(hosts: tuple[Host, Host], train: Callable[..., Started], run: Path) -> tuple[Started, Started]:
    """Both hosts training."""
    one, two = (train(host, *ENDPOINT) for host in hosts)
    wait(lambda: meetings(one, two) > 0, "two ranks", one, two)
    goes_on(run, one, two)
    return one, two


def test_two_hosts_finish_together_and_a_rank_that_dies_is_named_on_both(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    a, b = hosts
    # Compared at every step, the other rank is likely to be waiting for word, which no broken connection ends.
    flags = (*ENDPOINT, "--check_replicas_every", "1")
    both = [train(host, *flags, nnodes="2", steps=400) for host in (a, b)]
    wait(lambda: step(tmp_path / "run") > 40, "40 steps", *both)
    victim = ranks(b)[0]
    os.kill(victim, signal.SIGKILL)
    assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)
    for each in both:
        assert f"rank 1 on host-b (process {victim}) was ended by SIGKILL at step " in each.said
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in record] == list(
        range(1, 401)
    )


LAST_WORK = """
import os, time
import drumline.train.summary
from drumline.model.gpt import GPT

def plot(*args, **kwargs):
    while not os.path.exists("done"):
        time.sleep(0.05)

drumline.train.summary.plot_loss = plot
"""


def test_a_host_that_is_done_waits_for_the_last_work_of_the_other(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "last_work.py").write_text(LAST_WORK)
    _, b = hosts
    both = [train(host, *ENDPOINT, "--model", "last_work:GPT", nnodes="2", steps=20) for host in hosts]
    wait(lambda: step(tmp_path / "run") == 20 and not ranks(b), "the end of host b's rank", *both)
    time.sleep(6)  # longer than a host that says nothing counts as alive
    (tmp_path / "done").touch()
    assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)


def test_a_host_that_dies_and_comes_back_is_done_without_and_taken_in_again(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    _, b = hosts
    one, _ = together(hosts, train, tmp_path / "run")
    kill(b)
    goes_on(tmp_path / "run", one)
    before = meetings(one)
    again = train(b, *ENDPOINT)
    wait(lambda: meetings(one, again) > before, "two ranks again", one, again)
    goes_on(tmp_path / "run", one, again)
    assert "everything is saved" in one.said  # host a was asked, and no step was lost


def test_a_host_whose_link_falls_silent_ends_its_ranks_and_comes_back_when_it_can(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    _, b = hosts
    one, two = together(hosts, train, tmp_path / "run")
    link(b, "down")
    wait(lambda: not ranks(b), "no ranks on host b", one, two)
    goes_on(tmp_path / "run", one, two)
    assert "cut off" in two.said
    before = meetings(one, two)
    link(b, "up")
    wait(lambda: meetings(one, two) > before, "two ranks again", one, two)
    goes_on(tmp_path / "run", one, two)


@pytest.mark.parametrize("endpoint", [(), ENDPOINT])
def test_when_the_host_that_keeps_the_meeting_point_dies_another_takes_over(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path, endpoint: tuple[str, ...]
) -> None:
    a, b = hosts
    one = train(a, *endpoint)
    wait((tmp_path / "run" / ".leader" / "epoch-1.json").exists, "a leader", one)
    two = train(b, *endpoint)
    wait(lambda: meetings(one, two) > 0, "two ranks", one, two)
    goes_on(tmp_path / "run", one, two)
    kill(a)
    goes_on(tmp_path / "run", two)
    before = meetings(two)
    again = train(a, *endpoint)
    wait(lambda: meetings(two, again) > before, "two ranks again", two, again)
    goes_on(tmp_path / "run", two, again)
