"""Are the hosts fit to start a run on? Every one is asked at once, and every trouble is told, with what to type."""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Mapping, Sequence

from drumline.errors import EXIT_INTERRUPTED, EXIT_USER, DrumlineError
from drumline.finding import Finding, worst
from drumline.hosts_file import RemoteHost
from drumline.records import tell
from drumline.ssh_plan import Plan
from drumline.ssh_sessions import Session, follow

_LIMIT_S = 120.0
"""How long a host may take to answer: longer than anything but a disk or a GPU that hangs."""


def ready(plan: Plan) -> int:
    """Ask all hosts, say what is not in order, and give an exit code: 0 if the run can start."""
    hosts = plan.hosts
    sessions = [Session(host, plan.ssh_line(host), plan.check()) for host in hosts]
    if follow(sessions, lambda host, line: None, together=False, limit_s=_LIMIT_S):
        tell(DrumlineError("interrupted", fix="start the same command again"))
        return EXIT_INTERRUPTED
    findings = [finding for session in sessions for finding in look(session, plan)]
    answered = {session.host: session.answers["versions"] for session in sessions if "versions" in session.answers}
    findings += compare_versions(answered, plan)
    say(findings, all_hosts=len(hosts))
    if worst(findings) == "failed":
        return EXIT_USER
    shown = ", ".join(f"{package} {version}" for package, version in answered[hosts[0]].items())
    names = ", ".join(host.name for host in hosts)
    sys.stdout.write(f"{len(hosts)} {'hosts are' if len(hosts) > 1 else 'host is'} ready: {names} ({shown})\n")
    sys.stdout.flush()
    return 0


def look(session: Session, plan: Plan) -> list[Finding]:
    """What one host's answer means."""
    host, answers = session.host, session.answers
    if "versions" not in answers:
        return [why_no_answer(session, plan)]
    findings = []
    meeting_host, addresses = plan.meeting_host, answers["meeting_addresses"]
    if not addresses:
        what = f"the name {meeting_host}, where all hosts meet, does not resolve there"
        fix = "name it in /etc/hosts there, or give --rdzv_endpoint ADDRESS:29400"
        findings.append(Finding("names", "failed", what, fix, host.name))
    elif host.name != meeting_host and all(ipaddress.ip_address(each).is_loopback for each in addresses):
        what = f"the name {meeting_host}, where all hosts meet, means the host itself there ({addresses[0]})"
        fix = "name its real address in /etc/hosts there, or give --rdzv_endpoint ADDRESS:29400"
        findings.append(Finding("names", "failed", what, fix, host.name))
    if not answers["cwd"]:
        fix = f"{plan.by_hand(host, 'mkdir', '-p', plan.workdir)}   # or give --workdir DIR"
        findings.append(Finding("folder", "failed", f"there is no {plan.workdir}", fix, host.name))
    elif "argv" in plan.check():
        findings += doctors_findings(session)
    return findings


def doctors_findings(session: Session) -> list[Finding]:
    """What the quick part of `drumline doctor` found on a host."""
    out = "\n".join(line.text for line in session.lines if line.stream == "stdout")
    name = session.host.name
    try:
        report = json.loads(out[out.index("{") :])
        found = [Finding(**{**finding, "host": finding["host"] or name}) for finding in report["findings"]]
    except (ValueError, KeyError, TypeError):
        if session.code is None:
            what = f"its checks did not end within {_LIMIT_S:.0f} s"
        else:
            said = _errors(session)
            errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
            what = f"its checks gave no report: {(errors or said or [f'exit code {session.code}'])[-1]}"
        fix = "drumline doctor --quick   # there"
        return [Finding("doctor", "failed" if session.code is None else "warning", what, fix, name)]
    return [finding for finding in found if finding.state != "ok"]


def why_no_answer(session: Session, plan: Plan) -> Finding:
    """What kept ssh, or Python at the other end, from answering."""
    host, said = session.host, _errors(session)
    text = "\n".join(said)
    by_hand = plan.by_hand(host, "true")
    causes = {
        "REMOTE HOST IDENTIFICATION HAS CHANGED": (
            "its host key has changed: another machine may pose as it",
            f"ask whose key it is; if all is well: ssh-keygen -R {host.name} && {by_hand}",
        ),
        "Host key verification failed": (
            "its host key is not known here",
            f"{by_hand}   # and say yes to the right key",
        ),
        "Permission denied": ("ssh is not let in without a password", f"ssh-copy-id {host.target}"),
        "Could not resolve hostname": (
            "its name does not resolve here",
            f"mend it in --hosts, or: echo 'ADDRESS {host.name}' >> /etc/hosts",
        ),
        "Connection refused": ("nothing listens for ssh there", f"systemctl start ssh   # on {host.name}"),
        "timed out": ("it does not answer", f"ping -c 3 {host.name}"),
        "No route to host": ("there is no way to it", f"ping -c 3 {host.name}"),
        "No module named": (
            f"drumline is not installed for {plan.python} there",
            f"{plan.by_hand(host, plan.python, '-m', 'pip', 'install', 'drumline')}   # or give --python PATH",
        ),
    }
    for sign, (what, fix) in causes.items():
        if sign in text:
            return Finding("ssh", "failed", f"{what} ({_last_of(said, sign)})", fix, host.name)
    if session.ssh_code in (126, 127):
        return Finding(
            "python", "failed", f"there is no {plan.python}", "give --python PATH, that of every host", host.name
        )
    last = said[-1] if said else f"exit code {session.ssh_code}"
    return Finding("ssh", "failed", f"no answer over ssh ({last})", by_hand, host.name)


def compare_versions(found: Mapping[RemoteHost, Mapping[str, str]], plan: Plan) -> list[Finding]:
    """Hosts whose versions are not those of the first one."""
    findings = []
    for host, versions in found.items():
        first, wanted = next(iter(found.items()))
        for package in versions:
            if versions[package] != wanted[package]:
                what = f"{package} is {versions[package]} there, and {wanted[package]} on {first.name}"
                install = (plan.python, "-m", "pip", "install", f"{package}=={wanted[package]}")
                other = f"give --python PATH, a Python {wanted[package]} on every host"
                fix = other if package == "python" else plan.by_hand(host, *install)
                findings.append(Finding("versions", "failed", what, fix, host.name))
    return findings


def say(findings: Sequence[Finding], *, all_hosts: int) -> None:
    """Two lines for each, those that several hosts have alike only once."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        joint = " " if finding.what.startswith("is ") else ": "  # as findings about variables do
        sentence = f"{finding.check}{joint}{finding.what}"
        alike.setdefault((finding.state, sentence, finding.fix), []).append(finding.host)
    for (state, what, fix), names in alike.items():
        who = "all hosts" if len(names) == all_hosts > 1 else ", ".join(names)
        if state == "failed":
            tell(DrumlineError(f"{who}: {what}", fix=fix))
        else:
            sys.stderr.write(f"{state}: {who}: {what}\n" + (f"  fix: {fix}\n" if fix else ""))


def _errors(session: Session) -> list[str]:
    return [line.text.strip() for line in session.lines if line.stream == "stderr" and line.text.strip()]


def _last_of(said: Sequence[str], sign: str) -> str:
    return next(line for line in reversed(said) if sign in line)
