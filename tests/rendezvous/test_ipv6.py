"""The rendezvous at an IPv6 address: on one host, and between two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hosts import two_hosts
from helpers.small import small

from drumline.files.run_folder import RunFolder
from drumline.network.interfaces import free_port

TIMEOUT_S = 120

pytestmark = pytest.mark.needs("ipv6")


def command(text: Path, run: Path, *more: str) -> list[str]:
    flags = small(
        "--train_data_path", str(text), "--global_batch_size", "8", "--total_steps", "3", "--run_dir", str(run)
    )
    return [sys.executable, "-m", "drumline", "train", *flags, *more]


def test_a_host_that_others_may_join_keeps_the_rendezvous_at_an_ipv6_address(text: Path, tmp_path: Path) -> None:
    more = ("--nproc", "2", "--nnodes", "1:2", "--rdzv_endpoint", f"[::1]:{free_port()}")
    done = subprocess.run(
        command(text, tmp_path / "run", *more),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert " x 2 ranks " in done.stdout and RunFolder(tmp_path / "run").read_status()["state"] == "finished"


@pytest.mark.needs("hosts")
def test_two_hosts_meet_at_an_ipv6_address(text: Path, tmp_path: Path) -> None:
    more = ("--nproc", "1", "--nnodes", "2", "--rdzv_endpoint", "[fd00::a]:29400")
    with two_hosts(tmp_path) as hosts:
        for host, address in zip(hosts, ("fd00::a/64", "fd00::b/64"), strict=True):
            words = ["ip", "-n", host.namespace, "address", "add", address, "dev", "eth0", "nodad"]
            subprocess.run(words, check=True)
        both = [host.start(command(text, tmp_path / "run", *more), cwd=tmp_path) for host in hosts]
        assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)
    assert " x 2 ranks " in both[0].said + both[1].said
