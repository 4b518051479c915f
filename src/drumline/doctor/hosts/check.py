"""Check several hosts together: they connect, exchange facts, probe every path between them, and time collectives.

Each host does the same; the first one collects and judges the results, and its findings are shared with all. Every
wait has a timeout, so that whatever is broken is reported.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.doctor.finding import Finding
from drumline.doctor.hosts.alike import compare_data
from drumline.doctor.hosts.collectives import CollectiveBackend, Timings, judge_timings, measure, merged
from drumline.doctor.hosts.judge import judge
from drumline.doctor.hosts.look import LOOK_S, look_at, peers
from drumline.doctor.hosts.rendezvous import CheckEndedError, Messenger, Rendezvous, connect
from drumline.doctor.hosts.report import HostFacts, Sight, data_hashes, label, own_facts
from drumline.network import ProbeServer, is_loopback, resolve, within

_LOOKS_S, _COLLECTIVES_S, _SLACK_S, _GRACE_S = 30.0, 90.0, 15.0, 8.0
_SAY_S, _WAIT_S, _GOODBYE_S = 5.0, 0.05, 15.0
_HASH_S, _HASH_BYTES_PER_S = 60.0, 10e6
"""How long hosts may take to hash their data: slow and network disks are not an error."""


@dataclass(frozen=True)
class HostsReport:
    """The result; the same on every host that reached the rendezvous."""

    findings: tuple[Finding, ...] = ()
    timings: tuple[Timings, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the hosts that joined, by number."""
    tells: bool = False
    """Whether this process prints the report: on the first host, or one that never reached the others."""


def check_hosts(
    rendezvous: Rendezvous,
    *,
    say: Callable[[str], None],
    patience_s: float = 30.0,
    data: Sequence[Path] = (),
    collectives: bool = True,
    clock: Callable[[], float] = time.time,
) -> HostsReport:
    """Check this host together with the others; every host calls this.

    patience_s: how long to wait for the other hosts; data: files and folders that should be identical
    """
    if rendezvous.spare:
        return HostsReport()
    try:
        check = _Check(rendezvous, say=say, patience_s=patience_s)
        return check.run(data, collectives=collectives, clock=clock)
    except CheckEndedError as ended:
        return HostsReport((ended.finding,), tells=True)


class _Check:
    """One host's part of the check."""

    def __init__(self, rendezvous: Rendezvous, *, say: Callable[[str], None], patience_s: float) -> None:
        self._rendezvous = rendezvous
        self._say = say
        self._patience_s = patience_s
        self._silent: set[int] = set()
        """Hosts that joined and then stopped responding; known only to the first host, which collects from all."""
        self._messenger = Messenger(connect(rendezvous, patience_s=patience_s, say=say), rendezvous.address)

    def run(self, data: Sequence[Path], *, collectives: bool, clock: Callable[[], float]) -> HostsReport:
        own = own_facts(self._number(), os.environ, data=data)
        findings, timings, fit = list[Finding](), list[Timings](), False
        with ProbeServer(own.addresses, clock=clock) as server:
            own = replace(own, token=server.token, ports=server.ports)
            self._messenger.post(f"facts/{own.number}", own.as_dict())
            hosts, attendance = self._gather(own)
            findings.append(attendance)
            if len(hosts) > 1:
                seen, fit = self._look_around(own, hosts, data, clock)
                findings += seen
        if fit and collectives:
            about_collectives, timings = self._reduce_together(own, hosts)
            findings += about_collectives
        names = {each.number: label(each, hosts) for each in hosts}
        self._part(own, [number for number in names if number not in self._silent])
        return HostsReport(tuple(findings), tuple(timings), names, tells=self._rendezvous.leads)

    def _number(self) -> int:
        if self._rendezvous.number is not None:
            return self._rendezvous.number
        if self._rendezvous.leads:
            return 0
        number = self._messenger.count("arrivals")
        if number >= self._rendezvous.hosts:
            host, expected = socket.gethostname(), self._rendezvous.hosts
            what = f"{host} joined as host {number + 1} of {expected}: one joined twice, or there are too many"
            fix = replace(self._rendezvous, hosts=number + 1, names=()).again
            raise CheckEndedError(Finding("rendezvous", "failed", what, fix, host))
        return number

    def _gather(self, own: HostFacts) -> tuple[list[HostFacts], Finding]:
        """The hosts that joined, and whether all did."""
        until = time.monotonic() + self._patience_s
        if self._rendezvous.leads:
            hosts = [self._facts(number) for number in self._call_the_roll(until)]
            attendance = self._attendance(hosts)
            came = [each.number for each in hosts]
            self._messenger.post("roster", {"came": came, "attendance": attendance.as_dict()})
            return hosts, attendance
        roster = self._from_leader("roster", until=until + _SLACK_S)
        if own.number not in roster["came"]:
            what = f"{own.host} joined after the others had stopped waiting"
            fix = f"{self._rendezvous.again} --patience {max(60.0, 2 * self._patience_s):.0f}"
            raise CheckEndedError(Finding("rendezvous", "failed", what, fix, own.host))
        return [self._facts(number) for number in roster["came"]], Finding(**roster["attendance"])

    def _facts(self, number: int) -> HostFacts:
        return HostFacts.from_dict(self._messenger.read(f"facts/{number}"))

    def _call_the_roll(self, until: float) -> list[int]:
        expected, say_at = range(self._rendezvous.hosts), time.monotonic() + _SAY_S
        while True:
            came = [number for number in expected if self._messenger.has(f"facts/{number}")]
            if len(came) == len(expected) or time.monotonic() > until:
                return came
            if time.monotonic() > say_at:
                self._say(f"{len(came)} of {len(expected)} hosts have joined; waiting for the others")
                say_at += 2 * _SAY_S
            time.sleep(_WAIT_S)

    def _missing(self, hosts: Sequence[HostFacts]) -> str:
        """The hosts that did not join; empty if unknown."""
        names = self._rendezvous.names
        gone = sorted(set(range(self._rendezvous.hosts)) - {each.number for each in hosts})
        if self._rendezvous.number is not None:
            return ", ".join(names[number] if names else f"host {number}" for number in gone)
        known = {word for each in hosts for word in (each.host, each.host.partition(".")[0], *each.addresses)}
        unseen = [name for name in names if known.isdisjoint(_meanings(name))]
        return ", ".join(unseen) if len(unseen) == len(gone) else ""

    def _attendance(self, hosts: Sequence[HostFacts]) -> Finding:
        expected, where = self._rendezvous.hosts, self._rendezvous.where
        here = ", ".join(label(each, hosts) for each in hosts)
        if len(hosts) == expected:
            return Finding("rendezvous", "ok", f"{expected} hosts joined at {where}: {here}")
        missing, address = self._missing(hosts), self._rendezvous.address
        came = f"{len(hosts)} of {expected} hosts joined at {where} within {self._patience_s:.0f} s"
        means = resolve(address)
        if len(hosts) == 1 and address != here and means and all(map(is_loopback, means)):
            what = f"{came}: {address} is {here} itself there, and every other host itself elsewhere"
            own = next(iter(hosts[0].addresses), "ADDRESS")
            return Finding("name", "failed", what, self._rendezvous.moved(own, self._rendezvous.port), here)
        fix = f"start the same check there too; if it runs there: nc -vz {address} {self._rendezvous.port}"
        what = f"{came}: {here}; missing: {missing or f'{expected - len(hosts)} more'}"
        return Finding("rendezvous", "failed", what, fix, missing)

    def _look_around(
        self, own: HostFacts, hosts: Sequence[HostFacts], data: Sequence[Path], clock: Callable[[], float]
    ) -> tuple[list[Finding], bool]:
        """What all hosts saw of each other, judged; and whether collectives are worth trying."""
        until, sights = time.monotonic() + min(_LOOKS_S, (len(hosts) - 2) * LOOK_S), list[Sight]()
        for target in peers(own, hosts):
            if not sights or time.monotonic() < until:
                sights += look_at(own, target, clock=clock)
        self._messenger.post(f"sights/{own.number}", [sight.as_dict() for sight in sights])
        self._post_data(own, hosts, data)
        until += LOOK_S + _GRACE_S
        if not self._rendezvous.leads:
            verdict = self._from_leader("verdict", until=until + _hashing_s(hosts) + _SLACK_S)
            return [Finding(**finding) for finding in verdict["findings"]], verdict["fit"]
        posted, silent = self._collect("sights", hosts, until=until)
        sights = [Sight(**sight) for each in posted.values() for sight in each]
        about_data = self._judge_data([each for each in hosts if each.number in posted], until + _hashing_s(hosts))
        findings = [*silent, *judge(hosts, sights), *about_data]
        fit = not self._silent and not any(sight.why or sight.stalled for sight in sights)
        self._messenger.post("verdict", {"findings": [finding.as_dict() for finding in findings], "fit": fit})
        return findings, fit

    def _post_data(self, own: HostFacts, hosts: Sequence[HostFacts], data: Sequence[Path]) -> None:
        """Report the data on this host. It may take as long as it needs: the host has already joined."""
        if _hashing_s(hosts):
            hashes = {name: digest for path in data for name, digest in data_hashes(path).items()}
            self._messenger.post(f"data/{own.number}", hashes)

    def _judge_data(self, hosts: Sequence[HostFacts], until: float) -> list[Finding]:
        if not _hashing_s(hosts):
            return []
        hashes, silent = self._collect("data", hosts, until=until, doing="hashing data")
        return [*silent, *compare_data(hosts, hashes)]

    def _reduce_together(self, own: HostFacts, hosts: Sequence[HostFacts]) -> tuple[list[Finding], list[Timings]]:
        findings, timings = [], []
        backends: list[CollectiveBackend] = ["gloo", "nccl"] if all(each.nccl for each in hosts) else ["gloo"]
        for backend in backends:
            self._messenger.post(f"collectives/{backend}/{own.number}", self._measure(own, hosts, backend))
            until = time.monotonic() + _COLLECTIVES_S + _SLACK_S
            if self._rendezvous.leads:
                judged, measured = self._judge_timings(backend, hosts, until)
                verdict = {
                    "findings": [finding.as_dict() for finding in judged],
                    "timings": measured.as_dict() if measured else None,
                }
                self._messenger.post(f"collectives/{backend}", verdict)
            verdict = self._from_leader(f"collectives/{backend}", until=until + _SLACK_S)
            findings += [Finding(**finding) for finding in verdict["findings"]]
            timings += [Timings.from_dict(verdict["timings"])] if verdict["timings"] else []
        return findings, timings

    def _measure(self, own: HostFacts, hosts: Sequence[HostFacts], backend: CollectiveBackend) -> dict[str, Any]:
        numbers = [each.number for each in hosts]
        try:
            return within(
                _COLLECTIVES_S, lambda: measure(self._messenger.store, numbers, own.number, backend)
            ).as_dict()
        except (RuntimeError, TimeoutError) as error:
            return {"error": str(error).splitlines()[0][:300]}

    def _judge_timings(
        self, backend: CollectiveBackend, hosts: Sequence[HostFacts], until: float
    ) -> tuple[list[Finding], Timings | None]:
        posted, findings = self._collect(f"collectives/{backend}", hosts, until=until)
        names = {each.number: label(each, hosts) for each in hosts}
        interfaces = {each.number: each.interfaces[0].name for each in hosts if each.interfaces}
        errors = {number: each["error"] for number, each in posted.items() if "error" in each}
        if not findings:  # a host that is silent now explains why others lost it
            findings += [
                _failed(backend, names[number], error, interfaces.get(number)) for number, error in errors.items()
            ]
        if findings:
            return findings, None
        timings = merged([Timings.from_dict(each) for each in posted.values()])
        return judge_timings(timings, names, interfaces), timings

    def _collect(
        self, key: str, hosts: Sequence[HostFacts], *, until: float, doing: str = ""
    ) -> tuple[dict[int, Any], list[Finding]]:
        """What each host posted under a key, and a finding for each that posted nothing.

        doing: what hosts that have not posted are busy with
        """
        posted: dict[int, Any] = {}
        say_at = time.monotonic() + _SAY_S
        until = max(until, time.monotonic() + _GRACE_S)  # this host may have been late itself
        while len(posted) < len(hosts) and time.monotonic() < until:
            for each in hosts:
                if each.number not in posted and self._messenger.has(f"{key}/{each.number}"):
                    posted[each.number] = self._messenger.read(f"{key}/{each.number}")
                    if "error" in posted[each.number]:  # by now the others have failed too, or are gone
                        until = min(until, time.monotonic() + _GRACE_S)
            busy = ", ".join(label(each, hosts) for each in hosts if each.number not in posted)
            if doing and busy and time.monotonic() > say_at:
                self._say(f"waiting for {busy}: {doing}")
                say_at += 2 * _SAY_S
            time.sleep(_WAIT_S)
        silent = []
        for each in hosts:
            if each.number not in posted:
                name = label(each, hosts)
                what = f"{name} joined and then stopped responding{f' while {doing}' if doing else ''}"
                fix = f"ping -c 3 {next(iter(each.addresses), each.host)}"
                silent.append(Finding("rendezvous", "failed", what, fix, name))
                self._silent.add(each.number)
        return posted, silent

    def _from_leader(self, key: str, *, until: float) -> Any:
        message = self._messenger.wait(key, until=until)
        if message is None:
            where = self._rendezvous.address
            what = f"the first host stopped responding ({self._rendezvous.where} still responds)"
            raise CheckEndedError(Finding("rendezvous", "failed", what, f"ping -c 3 {where}", where))
        return message

    def _part(self, own: HostFacts, others: Sequence[int]) -> None:
        """The host of the store exits last, so that slow hosts can still read the findings."""
        if not self._rendezvous.keeps:
            with suppress(CheckEndedError):  # the host of the store may exit as soon as it reads this
                self._messenger.post(f"left/{own.number}", True)
            return
        until = time.monotonic() + _GOODBYE_S
        for number in others:
            if number != own.number:
                self._messenger.wait(f"left/{number}", until=until)


def _hashing_s(hosts: Sequence[HostFacts]) -> float:
    """How long to wait for the data of these hosts; 0 if none is compared."""
    if not any(each.data_paths for each in hosts):
        return 0.0
    return _HASH_S + max(each.hashed_bytes for each in hosts) / _HASH_BYTES_PER_S


def _meanings(name: str) -> set[str]:
    """All names that a host given as [USER@]NAME may use for itself."""
    bare = name.rpartition("@")[2]
    return {bare, bare.partition(".")[0], *resolve(bare)}


def _failed(backend: CollectiveBackend, host: str, error: str, interface: str | None) -> Finding:
    what = f"{backend} fails on {host}, although plain TCP connections work: {error}"
    variables = "GLOO_SOCKET_IFNAME" if backend == "gloo" else "NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME"
    return Finding(backend, "failed", what, f"export {variables}={interface or 'eth0'}", host)
