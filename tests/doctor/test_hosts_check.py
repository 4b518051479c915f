"""Judging made-up reports: each fault is laid at the right host's door, with the line that mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from drumline.doctor.finding import Finding, worst
from drumline.doctor.hosts.alike import compare_data
from drumline.doctor.hosts.collectives import PairRow, SizeRow, Timings, judge_timings, merged, rounds
from drumline.doctor.hosts.judge import judge
from drumline.doctor.hosts.look import peers
from drumline.doctor.hosts.report import BY_MANIFEST, BY_NAME, HostFacts, Sight
from drumline.network.interfaces import Interface

VERSIONS = {"drumline": "0.1.0", "python": "3.11.2", "torch": "2.13.0+cpu", "cuda": "None", "nccl": "none"}
MANY = pytest.mark.parametrize("count", [2, 3, 5])


def address(number: int, *, net: int = 0) -> str:
    return f"10.0.{net}.{number + 1}"


def host(number: int, **more: Any) -> HostFacts:
    interface = Interface("eth0", (address(number),), 1500, True)
    made = HostFacts(number, f"host-{number}", (interface,), address(number), versions=VERSIONS)
    return replace(made, **more)


def healthy(count: int) -> tuple[list[HostFacts], dict[tuple[int, int], Sight]]:
    hosts = [host(number) for number in range(count)]
    sights = {
        (source, target): Sight(
            source,
            target,
            address=address(target),
            own_address=address(source),
            name_means=address(target),
            rtt_s=2e-4,
            segments=3000,
        )
        for source, target in permutations(range(count), 2)
    }
    return hosts, sights


def bad(hosts: Sequence[HostFacts], sights: dict[tuple[int, int], Sight]) -> list[Finding]:
    return [finding for finding in judge(hosts, list(sights.values())) if finding.state != "ok"]


def broken(count: int, at: set[tuple[int, int]], **how: Any) -> list[Finding]:
    """Findings where the sights of some pairs are changed."""
    hosts, sights = healthy(count)
    return bad(hosts, {pair: replace(sight, **how) if pair in at else sight for pair, sight in sights.items()})


def to(number: int, count: int) -> set[tuple[int, int]]:
    return {(source, number) for source in range(count) if source != number}


def of(number: int, count: int) -> set[tuple[int, int]]:
    return {(number, target) for target in range(count) if target != number}


@MANY
def test_healthy_hosts_give_only_good_news(count: int) -> None:
    hosts, sights = healthy(count)
    findings = judge(hosts, list(sights.values()))
    assert worst(findings) == "ok"
    assert {finding.check for finding in findings} >= {
        "reach",
        "packets",
        "loss",
        "latency",
        "interface",
        "clock",
        "versions",
    }


@MANY
def test_every_bad_finding_ends_in_a_line_to_type(count: int) -> None:
    faults: list[dict[str, Any]] = [
        {"why": "timed out"},
        {"why": "refused"},
        {"why": "no route"},
        {"why": "unreachable"},
        {"why": "forbidden"},
        {"why": "silent"},
        {"why": "timed out", "other": "10.0.0.2"},
        {"stalled": True},
        {"stalled": True, "largest_packet": 1500},
        {"retransmitted": 100},
        {"name_means": ""},
    ]
    for fault in faults:
        for at in ({(0, 1)}, to(1, count), of(1, count)):
            findings = broken(count, at, **fault)
            assert findings and all(finding.fix and finding.host for finding in findings), fault


@MANY
def test_a_host_that_lets_nobody_in_is_named(count: int) -> None:
    (finding,) = broken(count, to(1, count), why="timed out")
    assert (finding.check, finding.state, finding.host) == ("reach", "failed", "host-1")
    assert "packets are dropped" in finding.what
    assert finding.fix == ("ufw allow from 10.0.0.1" if count == 2 else "ufw allow in on eth0")


@pytest.mark.parametrize("count", [3, 5])
def test_a_host_that_gets_out_to_nobody_is_named(count: int) -> None:
    (finding,) = broken(count, of(1, count), why="timed out")
    assert (finding.host, finding.fix) == ("host-1", "ufw allow out on eth0")


@pytest.mark.parametrize("count", [3, 5])
def test_a_host_that_lets_one_other_not_in_is_named_with_that_other(count: int) -> None:
    (finding,) = broken(count, {(0, 2)}, why="refused")
    assert (finding.host, finding.fix) == ("host-2", "ufw allow from 10.0.0.1")
    assert "host-0 cannot open connections to host-2" in finding.what and "host-1" in finding.what


@MANY
def test_an_address_that_others_do_not_reach_while_another_answers_is_a_wrong_interface(count: int) -> None:
    hosts, sights = healthy(count)
    interfaces = (Interface("eth0", (address(1),), 1500, True), Interface("eth1", (address(1, net=9),), 1500, True))
    hosts[1] = replace(hosts[1], interfaces=interfaces, gloo=address(1, net=9))
    for pair in to(1, count):
        sights[pair] = replace(sights[pair], address=address(1, net=9), why="no route", other=address(1))
    (finding,) = bad(hosts, sights)
    assert (finding.check, finding.host) == ("interface", "host-1")
    assert finding.fix == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    assert "announces 10.0.9.2 on eth1" in finding.what and "10.0.0.2 (eth0) answers" in finding.what


@MANY
@pytest.mark.parametrize("announced", ["127.0.1.1", "::1", None])
def test_a_host_that_announces_itself_to_itself_is_told_which_interface_to_name(
    count: int, announced: str | None
) -> None:
    hosts, sights = healthy(count)
    hosts[1] = replace(hosts[1], gloo=announced)
    for pair in to(1, count):
        sights[pair] = replace(sights[pair], address=announced or "", why="unreachable", other=address(1))
    (finding,) = bad(hosts, sights)
    assert (finding.check, finding.host) == ("interface", "host-1")
    assert finding.fix == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    # Nothing is said of a firewall where the address alone is wrong.
    unseen = {pair: replace(sight, other="") if sight.why else sight for pair, sight in sights.items()}
    assert [each.check for each in bad(hosts, unseen)] == ["interface"]


def test_an_interface_that_is_wrong_for_nccl_alone_is_mended_for_nccl_alone() -> None:
    hosts, sights = healthy(2)
    interfaces = (*hosts[1].interfaces, Interface("ib0", (address(1, net=9),), 1500, True))
    hosts[1] = replace(hosts[1], interfaces=interfaces, nccl=address(1, net=9))
    at_nccl = replace(
        sights[0, 1], use="nccl", address=address(1, net=9), why="timed out", other=address(1), name_means=address(1)
    )
    (finding,) = [each for each in judge(hosts, [*sights.values(), at_nccl]) if each.state != "ok"]
    assert (finding.host, finding.fix) == ("host-1", "export NCCL_SOCKET_IFNAME=eth0")


@MANY
def test_a_black_hole_is_laid_to_the_host_whose_packets_vanish(count: int) -> None:
    (finding,) = broken(count, of(1, count), stalled=True, largest_packet=1400)
    assert (finding.check, finding.state, finding.host) == ("packets", "failed", "host-1")
    assert "MTU black hole: packets of more than 1400 bytes" in finding.what
    assert finding.fix == "ip link set dev eth0 mtu 1400"


@pytest.mark.parametrize("count", [3, 5])
def test_a_black_hole_around_one_host_is_laid_to_that_host_alone(count: int) -> None:
    (finding,) = broken(count, of(2, count) | to(2, count), stalled=True, largest_packet=1450)
    assert (finding.host, finding.fix) == ("host-2", "ip link set dev eth0 mtu 1450")


@MANY
def test_loss_is_laid_to_the_host_that_had_to_send_again(count: int) -> None:
    (finding,) = broken(count, of(1, count), retransmitted=60)
    assert (finding.check, finding.state, finding.host) == ("loss", "warning", "host-1")
    assert "2.0% retransmitted" in finding.what


def test_a_few_packets_sent_again_are_nothing() -> None:
    assert not broken(3, {(0, 1)}, retransmitted=5)


@pytest.mark.parametrize("count", [3, 5])
def test_a_host_that_is_slow_with_everyone_is_named(count: int) -> None:
    (finding,) = broken(count, of(2, count) | to(2, count), rtt_s=0.04)
    assert (finding.check, finding.host) == ("latency", "host-2")
    assert "40.0 ms" in finding.what


def test_of_two_hosts_none_is_the_slow_one() -> None:
    assert not broken(2, {(0, 1), (1, 0)}, rtt_s=0.04)


@MANY
def test_a_clock_that_is_off_is_named_with_the_seconds(count: int) -> None:
    hosts, sights = healthy(count)
    for pair in to(1, count):
        sights[pair] = replace(sights[pair], skew_s=-7.0)
    for pair in of(1, count):
        sights[pair] = replace(sights[pair], skew_s=7.0)
    (finding,) = bad(hosts, sights)
    assert (finding.check, finding.host, finding.fix) == ("clock", "host-1", "timedatectl set-ntp true")
    assert "7.0 s behind" in finding.what


def test_of_three_clocks_the_first_may_be_the_wrong_one() -> None:
    hosts, sights = healthy(3)
    for source, target in sights:
        skew_s = {0: -3.0}.get(source, 0.0) - {0: -3.0}.get(target, 0.0)
        sights[source, target] = replace(sights[source, target], skew_s=skew_s)
    (finding,) = bad(hosts, sights)
    assert finding.host == "host-0" and "3.0 s ahead of the others" in finding.what


@MANY
def test_the_host_with_other_versions_is_named_with_what_to_install(count: int) -> None:
    hosts, sights = healthy(count)
    hosts[1] = replace(hosts[1], versions={**VERSIONS, "torch": "2.12.0+cu126", "cuda": "12.6", "python": "3.12.1"})
    python, torch = bad(hosts, sights)
    assert {python.host, torch.host} == {"host-1"}
    assert (python.what, python.fix) == (
        "host-1 has python 3.12.1, the others 3.11.2",
        "uv venv --clear --python 3.11.2 && uv pip install -c constraints.txt -e .",
    )
    assert torch.what == "host-1 has torch 2.12.0+cu126, the others 2.13.0+cpu"
    assert torch.fix == "pip install torch==2.13.0+cpu"


def test_the_host_with_another_drumline_is_told_how_to_update_its_checkout() -> None:
    hosts, sights = healthy(3)
    hosts[2] = replace(hosts[2], versions={**VERSIONS, "drumline": "0.0.9"})
    (finding,) = bad(hosts, sights)
    assert (finding.host, finding.fix) == ("host-2", "git pull && pip install -c constraints.txt -e .")


def with_nccl(values: Sequence[str]) -> list[Finding]:
    hosts, sights = healthy(len(values))
    made = {**VERSIONS, "torch": "2.13.0+cu126", "cuda": "12.6"}
    hosts = [replace(each, versions={**made, "nccl": value}) for each, value in zip(hosts, values, strict=True)]
    return bad(hosts, sights)


def test_a_host_whose_gpu_torch_cannot_use_is_told_so_and_not_to_install_torch() -> None:
    (finding,) = with_nccl(["2.27.3", "none", "2.27.3"])
    assert (finding.check, finding.state, finding.host, finding.fix) == ("CUDA", "failed", "host-1", "drumline doctor")
    assert finding.what == "host-1 has no usable GPU, the others have"
    assert [each.what for each in with_nccl(["none", "none", "2.27.3"])] == [
        "host-0 has no usable GPU, host-2 has",
        "host-1 has no usable GPU, host-2 has",
    ]
    (other,) = with_nccl(["2.27.3", "2.27.3", "2.26.2"])
    assert (other.check, other.host, other.fix) == ("versions", "host-2", "pip install torch==2.13.0+cu126")


@MANY
def test_the_host_with_other_data_is_named_with_the_line_that_copies_it(count: int) -> None:
    hosts = [host(number, data_paths={"tokens": "/data/tokens"}) for number in range(count)]
    hosts[1] = replace(hosts[1], data_paths={"tokens": "/mnt/tokens"})
    digests = {number: {"tokens/train.bin": "a" * 64} for number in range(count)}
    (finding,) = compare_data(hosts, {**digests, 1: {"tokens/train.bin": "b" * 64}})
    assert (finding.check, finding.host) == ("data", "host-1")
    assert finding.what == "tokens/train.bin on host-1 is sha256 bbbbbbbbbbbb, on host-0 sha256 aaaaaaaaaaaa"
    assert finding.fix == "rsync -a host-0:/data/tokens /mnt/"
    (finding,) = compare_data(hosts, {**digests, 1: {"tokens/train.bin": "7 bytes, but 9 in its manifest"}})
    assert finding.what.startswith("tokens/train.bin on host-1 is 7 bytes, but 9 in its manifest, on host-0 sha256 aa")


def test_data_that_is_alike_is_told_with_how_it_was_compared() -> None:
    hosts = [host(number, data_paths={"text": "/data/text"}) for number in range(2)]

    def comparison(**data: str) -> Finding:
        (finding,) = compare_data(hosts, dict.fromkeys(range(2), data))
        return finding

    assert comparison(a="a" * 64) == Finding("data", "ok", "on all hosts 1 file is identical")
    listed, tokens = "b" * 64 + BY_NAME, "c" * 64 + BY_MANIFEST
    assert comparison(text=listed).what == "on all hosts 1 folder is identical by name and size"
    both = "on all hosts 1 file is identical, 2 files are identical by manifest and size"
    assert comparison(a="a" * 64, b=tokens, c=tokens).what == both
    nowhere = comparison(text="missing")
    assert (nowhere.state, nowhere.what, nowhere.fix) == ("failed", "text is missing on every host", "ls -l /data/text")


def test_hosts_that_told_nothing_of_their_data_are_not_said_to_lack_it() -> None:
    hosts = [host(number) for number in range(3)]
    (finding,) = compare_data(hosts, {0: {"a": "a" * 64}, 1: {"a": "a" * 64}})
    assert finding.state == "ok"


@MANY
def test_a_host_with_another_mtu_is_named_even_where_all_packets_pass(count: int) -> None:
    hosts, sights = healthy(count)
    hosts[1] = replace(hosts[1], interfaces=(Interface("eth0", (address(1),), 9000, True),))
    (finding,) = bad(hosts, sights)
    assert (finding.check, finding.state, finding.host) == ("mtu", "warning", "host-1")
    assert finding.fix == "ip link set dev eth0 mtu 1500"


def test_an_interface_slower_than_the_others_is_named() -> None:
    hosts, sights = healthy(3)
    hosts = [
        replace(each, interfaces=(replace(each.interfaces[0], speed_mbit=100 if each.number == 2 else 1000),))
        for each in hosts
    ]
    (finding,) = bad(hosts, sights)
    assert (finding.host, finding.what) == ("host-2", "eth0 on host-2 runs at 100 Mbit/s, others at 1,000")


def test_names_that_do_not_resolve_or_mean_another_machine_get_their_lines_for_etc_hosts() -> None:
    hosts, sights = healthy(3)
    sights[0, 1] = replace(sights[0, 1], name_means="")
    sights[0, 2] = replace(sights[0, 2], name_means="192.0.2.7")
    (finding,) = bad(hosts, sights)
    assert (finding.check, finding.host) == ("name", "host-0")
    assert "host-1 does not resolve, host-2 is 192.0.2.7" in finding.what
    assert finding.fix == "printf '10.0.0.2 host-1\\n10.0.0.3 host-2\\n' >> /etc/hosts"


def test_hosts_of_one_name_are_told_apart_by_number() -> None:
    hosts, sights = healthy(3)
    hosts = [replace(each, host="node") for each in hosts]
    for pair in to(2, 3):
        sights[pair] = replace(sights[pair], why="timed out")
    (finding,) = bad(hosts, sights)
    assert finding.host == "node (host 2)"


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_everyone_meets_everyone_once_and_nobody_two_at_a_time(count: int) -> None:
    table = rounds(count)
    assert sorted(pair for round_of in table for pair in round_of) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    for round_of in table:
        busy = [place for pair in round_of for place in pair]
        assert len(busy) == len(set(busy))


def test_in_each_turn_everyone_looks_at_another_and_at_no_more_than_some_of_many() -> None:
    hosts, _ = healthy(5)
    turns = [[each.number for each in peers(own, hosts)] for own in hosts]
    assert all(len(set(turn)) == 5 for turn in zip(*turns, strict=True))
    many = [host(number) for number in range(100)]
    assert 8 <= len(peers(many[3], many)) <= 16


def made_links(slow: int | None, *, latency_s: float = 2e-4, bytes_per_s: float = 1e9) -> Timings:
    pairs = []
    for pair in ((0, 1), (0, 2), (1, 2)):
        hurt = slow in pair
        pairs.append(PairRow(pair, latency_s if hurt else 2e-4, bytes_per_s if hurt else 1e9))
    return Timings("gloo", (SizeRow(4096, 1e-3), SizeRow(8 << 20, 0.1)), tuple(pairs))


@pytest.mark.parametrize("how", [{"latency_s": 0.05}, {"bytes_per_s": 1e7}])
def test_the_host_that_is_slow_in_all_its_pairs_is_named(how: dict[str, float]) -> None:
    names = {number: f"host-{number}" for number in range(3)}
    findings = judge_timings(made_links(1, **how), names, {1: "eth7"})
    (slow,) = [finding for finding in findings if finding.state != "ok"]
    assert (slow.check, slow.host, slow.fix) == ("gloo", "host-1", "tc -s qdisc show dev eth7")
    assert worst(judge_timings(made_links(None), names, {})) == "ok"


def test_what_each_host_measured_becomes_one_table_that_goes_through_the_store() -> None:
    whole = made_links(1, latency_s=0.05)
    parts = [replace(whole, pairs=tuple(row for row in whole.pairs if n in row.hosts)) for n in range(3)]
    assert merged([Timings.from_dict(part.as_dict()) for part in parts]) == whole
    assert whole.pair_rows({0: "a", 1: "b", 2: "c"})[0] == ("a - b", "50.00", "1.00 GB/s")
    assert whole.size_rows()[-1] == ("8 MiB", "100.00", "83.9 MB/s")


def test_facts_and_sights_go_through_the_store_whole() -> None:
    facts = host(1, ports={"10.0.0.2": [1, 2]}, token="x", data_paths={"a": "/b"}, hashed_bytes=7)
    assert HostFacts.from_dict(facts.as_dict()) == facts
    sight = Sight(1, 0, rtt_s=0.5, why="refused")
    assert Sight(**sight.as_dict()) == sight
