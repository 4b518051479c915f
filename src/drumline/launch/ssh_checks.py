"""Check that the hosts are ready for a run: all of them at once, reporting every problem with its fix."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from drumline.doctor import UNWRITABLE, Finding, worst
from drumline.errors import EXIT_INTERRUPTED, EXIT_USER, DrumlineError
from drumline.launch.ssh_plan import Plan
from drumline.launch.ssh_sessions import Session, follow
from drumline.network import Endpoint, is_loopback
from drumline.parallel import odd_ones
from drumline.report import tell

_LIMIT_S = 120.0
"""How long a host may take to respond: long enough for everything but a hung disk or GPU."""
_INSTALL = "pip install -c constraints.txt -e ."


def ready(plan: Plan) -> int:
    """Check all hosts, report problems, and return an exit code: 0 if the run can start."""
    hosts = plan.hosts
    sessions = [Session(host, plan.ssh_line(host), plan.check()) for host in hosts]
    if follow(sessions, lambda host, line: None, together=False, limit_s=_LIMIT_S):
        tell(DrumlineError("interrupted", fix="run the same command again"))
        return EXIT_INTERRUPTED
    known = rendezvous_addresses(sessions)
    findings = [finding for session in sessions for finding in look(session, plan, known)]
    findings += compare_versions(sessions, plan)
    say(findings, all_hosts=len(hosts))
    if worst(findings) == "failed":
        return EXIT_USER
    shown = ", ".join(f"{package} {version}" for package, version in sessions[0].answers["versions"].items())
    names = ", ".join(host.name for host in hosts)
    sys.stdout.write(f"{len(hosts)} {'hosts are' if len(hosts) > 1 else 'host is'} ready: {names} ({shown})\n")
    sys.stdout.flush()
    return 0


def look(session: Session, plan: Plan, known: Sequence[str] = ()) -> list[Finding]:
    """Findings from one host's answer.

    known: addresses of the rendezvous host, as resolved by other hosts
    """
    host, answers = session.host, session.answers
    if "versions" not in answers:
        return [why_no_answer(session, plan)]
    findings = []
    rendezvous_host, addresses = plan.rendezvous_host, answers["meeting_addresses"]
    elsewhere = plan.again(endpoint=Endpoint(next(iter(known), "ADDRESS"), plan.endpoint.port))
    if not addresses:
        what = f"the rendezvous host {rendezvous_host} does not resolve there"
        named = [plan.by_hand(host, f"echo {each} {rendezvous_host} | sudo tee -a /etc/hosts") for each in known]
        findings.append(Finding("names", "failed", what, next(iter(named), elsewhere), host.name))
    elif host.name != rendezvous_host and all(is_loopback(each) for each in addresses):
        what = f"the rendezvous host {rendezvous_host} resolves to the host itself there ({addresses[0]})"
        findings.append(Finding("names", "failed", what, elsewhere, host.name))
    if not answers["cwd"]:
        fix = f"{plan.by_hand(host, 'mkdir', '-p', plan.workdir)}   # or use --workdir DIR"
        findings.append(Finding("folder", "failed", f"{plan.workdir} does not exist", fix, host.name))
    elif "argv" in plan.check():
        findings += doctors_findings(session, plan)
    return findings


def doctors_findings(session: Session, plan: Plan) -> list[Finding]:
    """What `drumline doctor --quick` found on a host by itself."""
    out = "\n".join(line.text for line in session.lines if line.stream == "stdout")
    name = session.host.name
    try:
        report = json.loads(out[out.index("{") :])
        findings = [Finding(**{**finding, "host": finding["host"] or name}) for finding in report["findings"]]
    except (ValueError, KeyError, TypeError):
        if session.code is None:
            what = f"its checks did not finish within {_LIMIT_S:.0f} s"
        else:
            errors = [session.error["problem"]] if session.error else _errors(session)
            what = f"its checks returned no report: {(errors or [f'exit code {session.code}'])[-1]}"
        fix = plan.by_hand(
            session.host, f"cd {shlex.quote(plan.workdir)} && {shlex.quote(plan.python)} -m drumline doctor --quick"
        )
        return [Finding("doctor", "failed" if session.code is None else "warning", what, fix, name)]
    return [_among_hosts(finding, session, plan) for finding in findings if finding.state != "ok"]


def _among_hosts(finding: Finding, session: Session, plan: Plan) -> Finding:
    """Only the first host needs a writable run folder."""
    spared = finding.code == UNWRITABLE and session.host != plan.hosts[0]
    return replace(finding, state="warning") if spared else finding


def why_no_answer(session: Session, plan: Plan) -> Finding:
    """Why ssh, or Python on the host, did not respond."""
    host, said = session.host, _errors(session)
    text = "\n".join(said)  # ssh has one exit code for all failures, so its messages have to be parsed
    by_hand = plan.by_hand(host, "true")
    install = plan.by_hand(host, f"cd CHECKOUT && {shlex.quote(plan.python)} -m {_INSTALL}")
    causes = {
        "REMOTE HOST IDENTIFICATION HAS CHANGED": (
            "its host key has changed: another machine may be impersonating it",
            f"ssh-keygen -R {host.name} && {by_hand}   # once you have verified the new key",
        ),
        "Host key verification failed": (
            "its host key is unknown",
            f"{by_hand}   # and accept the key if it is correct",
        ),
        "Permission denied": ("ssh login without a password is not set up", f"ssh-copy-id {host.target}"),
        "Could not resolve hostname": (
            "its name does not resolve here",
            f"echo ADDRESS {host.name} | sudo tee -a /etc/hosts   # or correct the name in --hosts",
        ),
        "Connection refused": ("no ssh server is running there", f"systemctl start ssh   # on {host.name}"),
        "timed out": ("it does not answer", f"ping -c 3 {host.name}"),
        "No route to host": ("there is no route to it", f"ping -c 3 {host.name}"),
        "No module named": (
            f"drumline is not installed for {plan.python} there",
            f"{install}   # CHECKOUT: the drumline repository there",
        ),
    }
    for sign, (what, fix) in causes.items():
        if sign in text:
            return Finding("ssh", "failed", f"{what} ({_last_of(said, sign)})", fix, host.name)
    if session.ssh_code in (126, 127):
        fix = f"{plan.again(python='PATH')}   # PATH: a Python with drumline, the same on every host"
        return Finding("python", "failed", f"{plan.python} does not exist", fix, host.name)
    last = said[-1] if said else f"exit code {session.ssh_code}"
    return Finding("ssh", "failed", f"no response over ssh ({last})", by_hand, host.name)


def compare_versions(sessions: Sequence[Session], plan: Plan) -> list[Finding]:
    """Hosts whose versions differ from most."""
    answered = {session.host.name: session for session in sessions if "versions" in session.answers}
    findings = []
    for package in next(iter(answered.values())).answers["versions"] if answered else ():
        versions = {name: session.answers["versions"][package] for name, session in answered.items()}
        wanted, odd = odd_ones(versions)
        first = next(name for name in versions if name not in odd)
        for name in odd:
            what = f"{package} is {versions[name]} there, but {wanted} on {first}"
            findings.append(Finding("versions", "failed", what, _install(package, wanted, answered[name], plan), name))
    return findings


def _install(package: str, version: str, session: Session, plan: Plan) -> str:
    """The command that installs a version on a host; drumline itself is installed from its checkout."""
    if package == "torch":
        return plan.by_hand(session.host, plan.python, "-m", "pip", "install", f"{package}=={version}")
    how = {
        "python": f"uv venv --clear --python {version} && uv {_INSTALL}",
        "drumline": f"git pull && {shlex.quote(plan.python)} -m {_INSTALL}",
    }
    checkout = session.answers["checkout"]
    folder = shlex.quote(checkout) if checkout else "CHECKOUT"
    return plan.by_hand(session.host, f"cd {folder} && {how[package]}")


def rendezvous_addresses(sessions: Sequence[Session]) -> list[str]:
    """What the rendezvous host's name resolves to on hosts that answered, if others could use it."""
    addresses = [address for session in sessions for address in session.answers.get("meeting_addresses", ())]
    return [address for address in addresses if not is_loopback(address)]


def say(findings: Sequence[Finding], *, all_hosts: int) -> None:
    """Print two lines for each finding; those that several hosts share only once."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        alike.setdefault((finding.state, finding.sentence, finding.fix), []).append(finding.host)
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
