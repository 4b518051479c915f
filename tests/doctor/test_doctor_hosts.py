"""Hosts with real faults between them, checked together: the right host is named, with the cause and what to type."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.hosts import PORT, Called, Host, hosts_on_a_switch, two_hosts

from drumline.doctor.finding import Finding
from drumline.doctor.hosts.check import HostsReport, check_hosts
from drumline.doctor.hosts.rendezvous import rendezvous_at
from drumline.doctor.hosts.report import data_hashes
from drumline.parallel.hardware import versions

pytestmark = pytest.mark.needs("hosts")

LIMIT_S = 120.0
BRIEF_S = 2.0
"""How long a host is waited for that cannot come."""

Hosts = tuple[Host, Host]


def run_check(
    *,
    hosts: int = 2,
    endpoint: str = f"host-a:{PORT}",
    names: Sequence[str] = (),
    patience_s: float = LIMIT_S,
    collectives: bool = False,
    ahead_s: float = 0.0,
    torch_version: str = "",
    data: Sequence[Path] = (),
    dies_with: str = "",
    says_to: Path | None = None,
    hashes_after: Path | None = None,
) -> HostsReport:
    """The check on one host, with what may be wrong with this host itself: it dies with a call of MODULE.NAME.

    says_to: a file that is made as soon as this host says that it waits for hashes
    hashes_after: a file without which this host does not finish to hash its data
    """
    if torch_version:
        real = versions()
        _patch("report.versions", lambda: {**real, "torch": torch_version})
    if dies_with:
        _patch(dies_with, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    if says_to:
        _patch("check._SAY_S", 0.1)
    if hashes_after:
        _patch("check.data_hashes", functools.partial(_hash_late, hashes_after))

    def say(text: str) -> None:
        if says_to and text.endswith(": hashing data"):
            says_to.write_text(text)

    return check_hosts(
        rendezvous_at(endpoint, hosts=hosts, names=names),
        say=say,
        patience_s=patience_s,
        collectives=collectives,
        data=data,
        clock=lambda: time.time() + ahead_s,
    )


def _hash_late(waits_for: Path, path: Path) -> dict[str, str]:
    until = time.monotonic() + LIMIT_S / 2
    while not waits_for.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return data_hashes(path)


def _patch(name: str, replacement: Any) -> None:
    """In a process that ends with the test."""
    module, _, name = name.partition(".")
    setattr(importlib.import_module(f"drumline.doctor.hosts.{module}"), name, replacement)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def hosts(both: Hosts) -> Iterator[Hosts]:
    """Two hosts that are healed when the test ends; one pair serves all tests, each at a time of its own."""
    yield both
    for host in both:
        host.end_all()
        host.heal()


def call(host: Host, *, env: dict[str, str] | None = None, **how: Any) -> Called:
    return host.call(functools.partial(run_check, **how), env=env)


def reports(calls: Sequence[Called]) -> list[HostsReport]:
    return [each.result(within_s=LIMIT_S) for each in calls]


def bad(report: HostsReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.state != "ok"]


def the(report: HostsReport, check: str) -> Finding:
    """The only bad finding of a check."""
    findings = [finding for finding in bad(report) if finding.check == check]
    assert len(findings) == 1, report.findings
    return findings[0]


def test_healthy_hosts_meet_reach_each_other_and_reduce(hosts: Hosts) -> None:
    first, second = reports([call(host, collectives=True) for host in hosts])
    assert not [finding for finding in first.findings if finding.state == "failed"]
    assert first.findings == second.findings and (first.tells, second.tells) == (True, False)
    assert "2 hosts joined at host-a:29500: host-a, host-b" in first.findings[0].what
    (timings,) = first.timings
    assert timings.backend == "gloo" and [row.hosts for row in timings.pairs] == [(0, 1)]
    assert timings.sizes[0].bytes == 4096 and timings.sizes[0].seconds > 0
    assert any("all-reduce over 2 hosts" in finding.what for finding in first.findings)


@pytest.mark.needs("firewall")
def test_a_meeting_port_that_is_closed_is_named_on_both_hosts(hosts: Hosts) -> None:
    a, b = hosts
    a.filter("input", f"iifname eth0 tcp dport {PORT} drop")
    first, second = reports([call(host, patience_s=BRIEF_S) for host in (a, b)])
    finding = the(second, f"port {PORT}")
    assert (finding.state, finding.host, finding.fix) == ("failed", "host-a", f"ufw allow {PORT}/tcp")
    assert f"host-b tried host-a (10.77.0.1) port {PORT}" in finding.what and "drops the packets" in finding.what
    assert "1 of 2 hosts joined" in the(first, "rendezvous").what
    assert first.tells and second.tells


@pytest.mark.parametrize(("names", "missing"), [((), "1"), (("root@host-a", "host-b"), "host-b")])
def test_a_host_that_never_comes_is_missed_by_name_where_names_are_known(
    hosts: Hosts, names: tuple[str, ...], missing: str
) -> None:
    (report,) = reports([call(hosts[0], patience_s=BRIEF_S, names=names)])
    finding = the(report, "rendezvous")
    assert f"1 of 2 hosts joined at host-a:29500 within 2 s: host-a; missing: {missing}" in finding.what
    assert finding.fix.endswith("nc -vz host-a 29500")


def test_a_first_host_that_never_comes_is_named(hosts: Hosts) -> None:
    (report,) = reports([call(hosts[1], patience_s=BRIEF_S)])
    finding = the(report, f"port {PORT}")
    assert finding.host == "host-a" and "has refused host-b on port 29500" in finding.what
    assert "start the check on host-a too" in finding.fix


def test_a_name_that_does_not_resolve_is_named(hosts: Hosts) -> None:
    (report,) = reports([call(hosts[1], endpoint="host-x:29500", patience_s=BRIEF_S)])
    finding = the(report, "name")
    assert finding.host == "host-b" and "host host-x" in finding.what and "does not resolve on host-b" in finding.what
    assert finding.fix == "echo 'ADDRESS host-x' >> /etc/hosts"


@pytest.mark.needs("firewall")
def test_ports_closed_in_one_direction_are_laid_to_the_host_that_lets_nobody_in(hosts: Hosts) -> None:
    a, b = hosts
    b.filter("input", "iifname eth0 tcp flags & (syn|ack) == syn drop")
    first, second = reports([call(host) for host in (a, b)])
    finding = the(first, "reach")
    assert (finding.state, finding.host, finding.fix) == ("failed", "host-b", "ufw allow from 10.77.0.1")
    assert "host-a cannot open connections to host-b (10.77.0.2 on eth0)" in finding.what
    assert second.findings == first.findings


@pytest.mark.needs("firewall")
def test_ports_that_are_rejected_are_told_from_packets_that_are_dropped(hosts: Hosts) -> None:
    a, b = hosts
    a.filter("input", f"iifname eth0 tcp dport != {PORT} tcp flags & (syn|ack) == syn reject with tcp reset")
    first, _ = reports([call(host) for host in (a, b)])
    finding = the(first, "reach")
    assert finding.host == "host-a" and "the connection is refused" in finding.what
    assert finding.fix == "ufw allow from 10.77.0.2"


def test_a_wrong_interface_is_named_with_the_right_one(hosts: Hosts) -> None:
    a, b = hosts
    for words in ("link add eth1 type bridge", "address add 10.88.0.2/24 dev eth1", "link set eth1 up"):
        subprocess.run(["ip", "-n", b.namespace, *words.split()], check=True)
    try:
        first, second = reports([call(a), call(b, env={"GLOO_SOCKET_IFNAME": "eth1"})])
    finally:
        subprocess.run(["ip", "-n", b.namespace, "link", "del", "eth1"], check=True)
    finding = the(first, "interface")
    assert finding.host == "host-b"
    assert finding.fix == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    assert "host-b announces 10.88.0.2 on eth1 to gloo, where host-a cannot reach it" in finding.what
    assert second.findings == first.findings


@pytest.mark.needs("firewall")
@pytest.mark.parametrize(("hurt", "spared"), [(1, 0), (0, 1)])
def test_an_mtu_black_hole_is_laid_to_the_host_whose_large_packets_vanish(hosts: Hosts, hurt: int, spared: int) -> None:
    # Where the packets would arrive: what is dropped as it leaves is known to the sender, and no black hole.
    hosts[spared].filter("prerouting", f"ip saddr {hosts[hurt].address} meta length > 1400 drop")
    first, second = reports([call(host, collectives=True) for host in hosts])
    finding = the(first, "packets")
    assert (finding.state, finding.host) == ("failed", hosts[hurt].name)
    assert finding.fix == "ip link set dev eth0 mtu 1400"
    assert f"more than 1400 bytes from {hosts[hurt].name} to {hosts[spared].name} are dropped" in finding.what
    assert first.findings == second.findings and not first.timings  # no collective was tried, which would have hung


@pytest.mark.needs("firewall")
def test_loss_is_laid_to_the_host_whose_packets_are_lost(hosts: Hosts) -> None:
    a, b = hosts
    a.filter("prerouting", f"ip saddr {b.address} meta length > 600 numgen random mod 100 < 15 drop")
    first, _ = reports([call(host) for host in (a, b)])
    findings = [finding for finding in first.findings if finding.check == "loss" and finding.host == "host-b"]
    assert findings and findings[0].state == "warning", first.findings
    assert "packets from host-b to host-a are lost" in findings[0].what
    assert findings[0].fix == "ip -s link show dev eth0"


def test_versions_a_clock_and_data_that_differ_are_laid_to_their_host(hosts: Hosts, tmp_path: Path) -> None:
    for name, content in (("a", "one"), ("b", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(content)
    calls = [
        call(hosts[0], data=[tmp_path / "a" / "tokenizer.json"]),
        call(hosts[1], data=[tmp_path / "b" / "tokenizer.json"], ahead_s=7.0, torch_version="2.12.1"),
    ]
    first, _ = reports(calls)
    versions, clock, data = (the(first, check) for check in ("versions", "clock", "data"))
    assert {versions.host, clock.host, data.host} == {"host-b"}
    assert "host-b has torch 2.12.1, the others" in versions.what and versions.fix.startswith("pip install torch==")
    assert "the clock of host-b is 7.0 s ahead of host-a" in clock.what and clock.fix == "timedatectl set-ntp true"
    assert "tokenizer.json on host-b is sha256" in data.what
    assert data.fix == f"rsync -a host-a:{tmp_path / 'a' / 'tokenizer.json'} {tmp_path / 'b'}/"


def test_a_host_that_hashes_for_long_is_waited_for_and_not_missed(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("one")
    data, said = [tmp_path / "tokens"], tmp_path / "said"
    first, second = reports([call(hosts[0], data=data, says_to=said), call(hosts[1], data=data, hashes_after=said)])
    assert said.read_text() == "waiting for host-b: hashing data"
    assert not [finding for finding in first.findings if finding.state == "failed"]
    assert "on all hosts 1 file is identical" in [finding.what for finding in first.findings]
    assert second.findings == first.findings


def test_a_host_that_dies_in_the_middle_of_the_collectives_is_named(hosts: Hosts) -> None:
    first, _ = call(hosts[0], collectives=True), call(hosts[1], collectives=True, dies_with="collectives.SizeRow")
    (report,) = reports([first])
    finding = the(report, "rendezvous")
    assert finding.host == "host-b" and "host-b joined and then stopped responding" in finding.what


def test_a_first_host_that_dies_is_named_by_the_others(hosts: Hosts) -> None:
    _, second = call(hosts[0], dies_with="check.judge"), call(hosts[1])
    (report,) = reports([second])
    finding = the(report, "rendezvous")
    assert finding.host == "host-a" and "stopped responding" in finding.what and report.tells


def test_of_three_hosts_the_one_behind_a_slow_link_is_named(tmp_path: Path) -> None:
    with hosts_on_a_switch(tmp_path, 3, delay_last_s=0.015) as three:
        first, *others = reports([call(host, hosts=3, collectives=True) for host in three])
    assert "host-c is slow: a round trip to any other host takes at least" in the(first, "latency").what
    assert the(first, "latency").host == the(first, "gloo").host == "host-c"
    assert "host-c is slow with every other host" in the(first, "gloo").what
    assert [row.hosts for row in first.timings[0].pairs] == [(0, 1), (0, 2), (1, 2)]
    assert all(other.findings == first.findings for other in others)


def test_ranks_that_torchrun_started_check_their_hosts_and_the_first_one_tells(hosts: Hosts, tmp_path: Path) -> None:
    flags = ("--nnodes=2", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_id=x", f"--rdzv_endpoint=host-a:{PORT}")
    started = [
        host.start(
            [sys.executable, "-m", "torch.distributed.run", *flags, "-m", "drumline", "doctor", "--json"], cwd=tmp_path
        )
        for host in hosts
    ]
    for each in started:
        assert each.ended(within_s=LIMIT_S) == 0, each.said
    # torchrun may log lines of its own, before and after.
    reports = [json.JSONDecoder().raw_decode(each.said[each.said.index("{\n") :])[0] for each in started]
    findings = [report["findings"] for report in reports]
    assert {finding["host"] for finding in findings[1]} == {"host-b"}  # of itself alone
    together = [finding for finding in findings[0] if finding["host"] != "host-a"]
    assert not [finding for finding in together if finding["state"] == "failed"]
    assert {"rendezvous", "reach", "packets", "gloo"} <= {finding["check"] for finding in together}
