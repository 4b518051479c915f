"""From what hosts reported about themselves and each other to findings: which host, which cause, which fix.

Pure functions: no I/O. If a fault could be at either end, the host that all faulty pairs have in common is named; with
only two hosts there is none, and the one whose packets are lost is named.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from drumline.doctor.finding import Finding
from drumline.doctor.hosts.alike import compare_versions
from drumline.doctor.hosts.report import HostFacts, Sight, label
from drumline.network import Interface, interface_of, is_loopback
from drumline.parallel import odd_ones

_SKEW_S = 1.0
"""torch's rendezvous considers a host dead if its clock is off by a few seconds."""
_LOST_SHARE, _LOST_SEGMENTS = 0.003, 6
_SLOWER, _SLOWER_S = 3.0, 1e-3
_REASONS = {
    "timed out": "packets are dropped",
    "refused": "the connection is refused",
    "no route": "there is no route",
    "unreachable": "no route to host: it is off that network, or a firewall rejects it",
    "forbidden": "this host's own firewall blocks it",
    "silent": "the connection opens, but nothing answers",
    "unresolved": "it does not resolve",
}


def judge(hosts: Sequence[HostFacts], sights: Sequence[Sight]) -> list[Finding]:
    """All findings about the hosts that joined; deterministic, in the order in which to fix them."""
    view = _View(hosts, sights)
    return [
        *_addresses(view),
        *_reach(view),
        *_names(view),
        *_packets(view),
        *_loss(view),
        *_latency(view),
        *_interfaces(view),
        *_clocks(view),
        *compare_versions(hosts),
    ]


class _View:
    """The reports, with queries for the judging functions."""

    def __init__(self, hosts: Sequence[HostFacts], sights: Sequence[Sight]) -> None:
        self.hosts = {facts.number: facts for facts in hosts}
        self.sights = [sight for sight in sights if {sight.source, sight.target} <= self.hosts.keys()]
        self.name = {facts.number: label(facts, hosts) for facts in hosts}

    def names(self, numbers: Iterable[int]) -> str:
        return ", ".join(self.name[number] for number in sorted(set(numbers)))

    def interface(self, number: int) -> Interface | None:
        """The interface that carries a host's traffic; the most used if there are several."""
        own = Counter(sight.own_address for sight in self.sights if sight.source == number and sight.own_address)
        facts = self.hosts[number]
        address = own.most_common(1)[0][0] if own else facts.gloo
        return (interface_of(address, facts.interfaces) if address else None) or next(iter(facts.interfaces), None)

    def interface_name(self, number: int) -> str:
        interface = self.interface(number)
        return interface.name if interface else "eth0"

    def at_fault(self, pairs: Collection[tuple[int, int]]) -> int | None:
        """The one host that all of these pairs have in common, if there are unaffected pairs without it."""
        common = set.intersection(*({*pair} for pair in pairs)) if pairs else set()
        peers = {number for pair in pairs for number in pair} - common
        return common.pop() if len(common) == 1 and len(peers) > 1 else None


def _addresses(view: _View) -> list[Finding]:
    """Hosts that announce an address where others cannot reach them, though they can at another one."""
    findings = []
    for number, facts in view.hosts.items():
        for use in ("gloo", "nccl"):
            sights = [sight for sight in view.sights if sight.target == number and sight.use == use]
            bad = [sight for sight in sights if sight.why]
            announced = facts.announced(use)
            nowhere = announced is None or is_loopback(announced)
            answering = Counter(sight.other for sight in bad if sight.other)
            if not bad or not (nowhere or answering):
                continue
            better = answering.most_common(1)[0][0] if answering else next(iter(facts.addresses), "")
            interface = interface_of(better, facts.interfaces)
            name = interface.name if interface else "eth0"
            at = (
                f"announces {announced}{_on(facts, announced)} to {use}" if announced else f"finds no address for {use}"
            )
            reason = "" if nowhere else f": {_REASONS[bad[0].why]}"
            cannot = f", where {view.names(sight.source for sight in bad)} cannot reach it{reason}" if announced else ""
            answers = f"; {better} ({name}) answers" if answering else ""
            both = f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
            fix = both if use == "gloo" else f"export NCCL_SOCKET_IFNAME={name}"
            findings.append(
                Finding("interface", "failed", f"{view.name[number]} {at}{cannot}{answers}", fix, view.name[number])
            )
    return findings


def _reach(view: _View) -> list[Finding]:
    """Pairs of hosts where one cannot reach any address of the other."""
    lost = {(sight.source, sight.target): sight for sight in view.sights if not sight.reached}
    tried = {(sight.source, sight.target) for sight in view.sights}
    findings = []
    for source in view.hosts:
        targets = [target for each, target in tried if each == source]
        mine = [(source, target) for target in targets]
        reached_by_others = all(
            any((each, target) in tried - lost.keys() for each in view.hosts if each != source) for target in targets
        )
        if len(targets) > 1 and all(pair in lost for pair in mine) and reached_by_others:
            reason = _REASONS[lost[mine[0]].why]
            what = f"{view.name[source]} cannot reach any other host, while they reach each other: {reason}"
            fix = f"ufw allow out on {view.interface_name(source)}"
            findings.append(Finding("reach", "failed", what, fix, view.name[source]))
            lost = {pair: sight for pair, sight in lost.items() if pair[0] != source}
    for target, facts in view.hosts.items():
        sights = [sight for pair, sight in lost.items() if pair[1] == target]
        loopback = facts.gloo is None or is_loopback(facts.gloo)
        if sights and not loopback:
            findings.append(_closed(view, facts, sights))
    if not findings and view.sights and all(sight.reached for sight in view.sights):
        findings.append(Finding("reach", "ok", f"all {len(view.hosts)} hosts reach each other in both directions"))
    return findings


def _closed(view: _View, facts: HostFacts, sights: Sequence[Sight]) -> Finding:
    name, first = view.name[facts.number], sights[0]
    sources = view.names(sight.source for sight in sights)
    if first.why == "no route":
        what = f"{sources} has no route to {name} ({first.address})"
        fix = f"ip route add {first.address} dev {view.interface_name(first.source)}"
        return Finding("reach", "failed", what, fix, view.name[first.source])
    other_pairs = [sight for sight in view.sights if sight.target == facts.number and sight.reached]
    what = (
        f"{sources} cannot open connections to {name} ({first.address}{_on(facts, first.address)}) on the ports that "
        f"collectives use: {_REASONS[first.why]}"
    )
    if len(sights) == 1 and first.own_address:
        fix = f"ufw allow from {first.own_address}"
    else:
        interface = interface_of(first.address, facts.interfaces)
        fix = f"ufw allow in on {interface.name if interface else view.interface_name(facts.number)}"
    if len(view.hosts) == 2 and first.why == "timed out":  # only a third host could tell which end it is
        what += f", there or on the way out of {sources}"
    if other_pairs:
        what += f"; {view.names(sight.source for sight in other_pairs)} can"
    return Finding("reach", "failed", what, fix, name)


def _names(view: _View) -> list[Finding]:
    """Host names that do not resolve, or resolve to another machine: torchrun announces names."""
    wrong: dict[int, list[Sight]] = {}
    for sight in view.sights:
        target = view.hosts[sight.target]
        alike = target.host == view.hosts[sight.source].host
        if sight.use == "gloo" and not alike and sight.name_means not in target.addresses:
            wrong.setdefault(sight.source, []).append(sight)
    findings = []
    for source, sights in wrong.items():
        lines, means = "", []
        for sight in sights:
            target = view.hosts[sight.target]
            address = sight.other or (sight.address if not sight.why else next(iter(target.addresses), ""))
            lines += f"{address} {target.host}\\n"
            means.append(f"{target.host} " + (f"is {sight.name_means}" if sight.name_means else "does not resolve"))
        what = f"on {view.name[source]}, names of other hosts resolve wrongly: {', '.join(means)}"
        findings.append(Finding("name", "warning", what, f"printf '{lines}' >> /etc/hosts", view.name[source]))
    return findings


def _packets(view: _View) -> list[Finding]:
    """MTU black holes: small packets pass, large ones are dropped silently."""
    holes = {(sight.source, sight.target): sight for sight in view.sights if sight.stalled}
    if not holes:
        whole = bool(view.sights) and all(sight.reached for sight in view.sights)
        return [Finding("packets", "ok", "large packets pass between all hosts")] if whole else []
    culprit = view.at_fault(holes)
    findings = []
    for number in [culprit] if culprit is not None else sorted({source for source, _ in holes}):
        mine = [sight for pair, sight in holes.items() if culprit is not None or pair[0] == number]
        interface, name = view.interface(number), view.name[number]
        mtu = interface.mtu if interface else 1500
        limit = min((sight.largest_packet for sight in mine if sight.largest_packet), default=0)
        peers = view.names({n for sight in mine for n in (sight.source, sight.target)} - {number})
        way = f"between {name} and {peers}" if culprit is not None else f"from {name} to {peers}"
        if limit >= mtu:
            what = f"almost nothing sent {way} arrives: packets of every size are lost"
            fix = f"ip -s link show dev {view.interface_name(number)}"
        else:
            over = f"packets of more than {limit} bytes" if limit else "large packets"
            has = f"{view.interface_name(number)} has mtu {mtu}"
            what = f"MTU black hole: {over} {way} are dropped while small ones pass ({has})"
            fix = f"ip link set dev {view.interface_name(number)} mtu {limit or 1400}"
        findings.append(Finding("packets", "failed", what, fix, name))
    return findings


def _loss(view: _View) -> list[Finding]:
    """Hosts that retransmit too much."""
    lossy = {
        (sight.source, sight.target): sight
        for sight in view.sights
        if not sight.stalled
        and sight.retransmitted >= _LOST_SEGMENTS
        and sight.retransmitted >= _LOST_SHARE * sight.segments
    }
    culprit = view.at_fault(lossy)
    findings = []
    for number in [culprit] if culprit is not None else sorted({source for source, _ in lossy}):
        mine = [sight for pair, sight in lossy.items() if culprit is not None or pair[0] == number]
        again, segments = sum(each.retransmitted for each in mine), sum(each.segments for each in mine)
        peers = view.names({n for sight in mine for n in (sight.source, sight.target)} - {number})
        way = "between {} and {}" if culprit is not None else "from {} to {}"
        what = (
            f"packets {way.format(view.name[number], peers)} are lost: {again / max(1, segments):.1%} retransmitted "
            f"({again:,} of {segments:,})"
        )
        fix = f"ip -s link show dev {view.interface_name(number)}"
        findings.append(Finding("loss", "warning", what, fix, view.name[number]))
    if not findings and any(sight.segments for sight in view.sights):
        findings.append(Finding("loss", "ok", "no packet loss"))
    return findings


def slow_host(values: dict[tuple[int, int], float], *, at_least: float) -> tuple[int, float, float] | None:
    """The host whose pairs are all slow while others are not, with its lowest value and the median of the others.

    values: by pair of hosts, larger is slower; needs three hosts. at_least: smaller differences are ignored
    """
    slowest: tuple[int, float, float] | None = None
    for number in {number for pair in values for number in pair}:
        own = [value for pair, value in values.items() if number in pair]
        rest = [value for pair, value in values.items() if number not in pair]
        if not rest:
            continue
        best, usual = min(own), statistics.median(rest)
        if best > _SLOWER * usual and best - usual > at_least and (slowest is None or best > slowest[1]):
            slowest = number, best, usual
    return slowest


def _latency(view: _View) -> list[Finding]:
    trips: dict[tuple[int, int], float] = {}
    for sight in view.sights:
        if sight.rtt_s:
            pair = (min(sight.source, sight.target), max(sight.source, sight.target))
            trips[pair] = min(sight.rtt_s, trips.get(pair, sight.rtt_s))
    if not trips:
        return []
    slow = slow_host(trips, at_least=_SLOWER_S)
    if slow is not None:
        number, own_s, usual_s = slow
        what = (
            f"{view.name[number]} is slow: a round trip to any other host takes at least {own_s * 1e3:.1f} ms, between "
            f"the others {usual_s * 1e3:.2f} ms"
        )
        return [
            Finding(
                "latency", "warning", what, f"tc -s qdisc show dev {view.interface_name(number)}", view.name[number]
            )
        ]
    least_s, most_s = min(trips.values()), max(trips.values())
    return [Finding("latency", "ok", f"a round trip takes {least_s * 1e3:.2f} to {most_s * 1e3:.2f} ms")]


def _interfaces(view: _View) -> list[Finding]:
    """The interfaces that carry traffic, listed and compared."""
    used = {number: interface for number in view.hosts if (interface := view.interface(number)) is not None}
    if not used:
        return []
    findings = []
    # If two hosts differ, neither is the usual one; the smaller MTU works for both, so it comes first.
    by_mtu = sorted(used, key=lambda number: used[number].mtu)
    mtu, _ = odd_ones({number: used[number].mtu for number in by_mtu})
    speed = max(interface.speed_mbit for interface in used.values())
    for number, interface in used.items():
        name = view.name[number]
        if interface.mtu != mtu:
            what = f"{name} has mtu {interface.mtu} on {interface.name}, the others {mtu}"
            findings.append(Finding("mtu", "warning", what, f"ip link set dev {interface.name} mtu {mtu}", name))
        if 0 < interface.speed_mbit < speed:
            what = f"{interface.name} on {name} runs at {interface.speed_mbit:,} Mbit/s, others at {speed:,}"
            findings.append(Finding("interface", "warning", what, f"ethtool {interface.name}", name))
        if interface.is_virtual:
            real = next((each.name for each in view.hosts[number].interfaces if not each.is_virtual), "eth0")
            what = f"traffic of {name} goes through {interface.name}, a virtual interface"
            fix = f"export GLOO_SOCKET_IFNAME={real} NCCL_SOCKET_IFNAME={real}"
            findings.append(Finding("interface", "warning", what, fix, name))
    alike: dict[str, list[int]] = {}
    for number, interface in used.items():
        alike.setdefault(f"{interface.name} (mtu {interface.mtu})", []).append(number)
    shown = [f"{kind} on {view.names(numbers)}" for kind, numbers in alike.items()]
    return [*findings, Finding("interface", "ok", f"traffic uses {', '.join(shown)}")]


def _clocks(view: _View) -> list[Finding]:
    if not view.sights:
        return []
    first = min(view.hosts)
    ahead = {first: 0.0}
    for sight in view.sights:  # also reported by others, if the first host could not ask
        if sight.rtt_s and sight.target == first:
            ahead.setdefault(sight.source, -sight.skew_s)
        elif sight.rtt_s and sight.source == first:
            ahead[sight.target] = sight.skew_s
    # With two hosts the first one's clock is the reference, with more the median.
    right = 0.0 if len(ahead) < 3 else statistics.median(ahead.values())
    findings = []
    for number, offset_s in ahead.items():
        off_s = offset_s - right
        if abs(off_s) > _SKEW_S:
            direction = "ahead of" if off_s > 0 else "behind"
            whom = view.name[first] if len(ahead) < 3 else "the others"
            what = f"the clock of {view.name[number]} is {abs(off_s):.1f} s {direction} {whom}"
            findings.append(Finding("clock", "warning", what, "timedatectl set-ntp true", view.name[number]))
    if not findings and len(ahead) > 1:
        spread_s = max(ahead.values()) - min(ahead.values())
        findings.append(Finding("clock", "ok", f"clocks differ by {spread_s * 1e3:.0f} ms at most"))
    return findings


def _on(facts: HostFacts, address: str | None) -> str:
    interface = interface_of(address, facts.interfaces) if address else None
    return f" on {interface.name}" if interface else ""
