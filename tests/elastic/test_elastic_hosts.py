"""Hosts that come, go, fall silent or lose their leader: the run goes on with those that are there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.elastic_hosts import TIMEOUT_S, goes_on, kill, link, ranks, rendezvous_count, step, wait
from helpers.hosts import Host, Started, two_hosts
from helpers.small import small

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.rendezvous import joining
from drumline.report.records import read_metrics

pytestmark = [pytest.mark.needs("hosts"), pytest.mark.needs_shm]

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


def together(hosts: tuple[Host, Host], train: Callable[..., Started], run: Path) -> tuple[Started, Started]:
    """Both hosts training."""
    one, two = (train(host, *ENDPOINT) for host in hosts)
    wait(lambda: rendezvous_count(one, two) > 0, "two ranks", one, two)
    goes_on(run, one, two)
    return one, two


@pytest.fixture
def debians(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path, debian=True) as pair:
        yield pair


def test_two_hosts_finish_together_and_a_rank_that_dies_is_named_on_both(
    debians: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    a, b = debians
    # Compared at every step, the other rank is likely to be waiting for word, which no broken connection ends.
    flags = (*ENDPOINT, "--check_replicas_every", "1")
    both = [train(host, *flags, nnodes="2", steps=150) for host in (a, b)]
    wait(lambda: step(tmp_path / "run") > 40, "40 steps", *both)
    victim = ranks(b)[0]
    os.kill(victim, signal.SIGKILL)
    assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)
    for each in both:
        assert f" on host-b (process {victim}) was killed by SIGKILL at step " in each.said
        assert (
            each.said.count("anyone who can reach host-a:29400 can take part in this run: set the same DRUMLINE") == 1
        )
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in record] == list(
        range(1, 151)
    )


LAST_WORK = """
import os, time
import drumline.train.summary
from drumline.model.gpt import GPT

def plot(*args, **kwargs):
    while not os.path.exists("done"):
        time.sleep(0.05)

drumline.train.summary.write_report = plot
"""


def test_a_host_that_is_done_waits_for_the_last_work_of_the_other(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "last_work.py").write_text(LAST_WORK)
    _, b = hosts
    both = [train(host, *ENDPOINT, "--model", "last_work:GPT", nnodes="2", steps=20) for host in hosts]
    wait(lambda: step(tmp_path / "run") == 20 and not ranks(b), "the end of host b's rank", *both)
    time.sleep(joining._SILENT_S + 0.5)  # longer than a host that says nothing counts as alive
    (tmp_path / "done").touch()
    assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)


def test_a_host_that_dies_and_comes_back_is_done_without_and_taken_in_again(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    _, b = hosts
    one, _ = together(hosts, train, tmp_path / "run")
    kill(b)
    goes_on(tmp_path / "run", one)
    before = rendezvous_count(one)
    again = train(b, *ENDPOINT)
    wait(lambda: rendezvous_count(one, again) > before, "two ranks again", one, again)
    goes_on(tmp_path / "run", one, again)
    assert "everything is saved" in one.said  # host a was asked, and no step was lost


OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def test_a_host_that_dies_with_its_shards_costs_no_more_than_a_rank_if_another_has_copies(
    hosts: tuple[Host, Host], tmp_path: Path, text: Path
) -> None:
    run = tmp_path / "run"
    flags = small("--train_data_path", str(text), "--global_batch_size", "16", "--total_steps", "100000")
    flags += ["--save_every", "100000", "--eval_every", "100000", "--log_every", "1", "--run_dir", str(run)]
    flags += ["--shard", "full", "--snapshot_every", "5", "--snapshot_copies", "2", "--nproc", "1", "--nnodes", "1:2"]
    enter = ["unshare", "--mount", "sh", "-c", OWN_MEMORY, "sh"]
    command = [*enter, sys.executable, "-m", "drumline", "train", *flags, *ENDPOINT]
    one, two = (host.start(command, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"}) for host in hosts)
    wait(lambda: step(run) > 30, "some snapshots", one, two)
    kill(hosts[1])
    reached = step(run)
    wait(lambda: "resuming from the memory of this host" in one.said, "the copies to be read", one)
    resumed = int(one.said.split("resuming from the memory of this host (step ")[1].split(")")[0].replace(",", ""))
    assert resumed > 0 and reached - resumed <= 5 + 2
    goes_on(run, one)


def test_groups_that_the_remaining_ranks_cannot_form_do_not_end_a_sharded_run(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path, text: Path
) -> None:
    run, own = tmp_path / "run", ("--bitwise", "--n_layers", "2")
    both = [train(host, *ENDPOINT, *own, "--nproc", "2", "--shard", "4", steps=150) for host in hosts]
    wait(lambda: step(run) > 20, "20 steps of four ranks", *both)
    kill(hosts[1])
    assert both[0].ended(within_s=TIMEOUT_S) == 0, both[0].said
    assert " x 4 ranks " in both[0].said and " x 2 ranks " in both[0].said
    assert both[0].said.count("2 ranks cannot be divided as --shard 4 asks: sharded over all of them for now") == 1
    alone = small("--train_data_path", str(text), "--global_batch_size", "16", "--total_steps", "150", *own)
    assert run_command(["train", *alone, "--run_dir", str(tmp_path / "alone")]) == 0
    weights = [RunFolder(tmp_path / name).read_status()["weights_sha256"] for name in ("run", "alone")]
    assert weights[0] == weights[1]


def test_a_host_whose_link_falls_silent_ends_its_ranks_and_comes_back_when_it_can(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path
) -> None:
    _, b = hosts
    one, two = together(hosts, train, tmp_path / "run")
    link(b, "down")
    wait(lambda: not ranks(b), "no ranks on host b", one, two)
    goes_on(tmp_path / "run", one, two)
    assert "lost the connection to the rendezvous host" in two.said
    before = rendezvous_count(one, two)
    link(b, "up")
    wait(lambda: rendezvous_count(one, two) > before, "two ranks again", one, two)
    goes_on(tmp_path / "run", one, two)


@pytest.mark.parametrize("endpoint", [(), ENDPOINT])
def test_when_the_host_that_keeps_the_meeting_point_dies_another_takes_over(
    hosts: tuple[Host, Host], train: Callable[..., Started], tmp_path: Path, endpoint: tuple[str, ...]
) -> None:
    a, b = hosts
    one = train(a, *endpoint)
    wait((tmp_path / "run" / ".leader" / "epoch-1.json").exists, "a leader", one)
    two = train(b, *endpoint)
    wait(lambda: rendezvous_count(one, two) > 0, "two ranks", one, two)
    goes_on(tmp_path / "run", one, two)
    kill(a)
    goes_on(tmp_path / "run", two)
    before = rendezvous_count(two)
    again = train(a, *endpoint)
    wait(lambda: rendezvous_count(two, again) > before, "two ranks again", two, again)
    goes_on(tmp_path / "run", two, again)
