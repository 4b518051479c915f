"""Start one run on several hosts over SSH, follow it, and report how it ended.

Each host runs the same elastic launcher as `drumline train --nnodes`, under a remote agent that stops it when this
process says so or is gone, and that sends back its exit code and last error.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.errors import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USAGE,
    EXIT_USER,
    DrumlineError,
    PeersLostError,
    RunLostError,
)
from drumline.launch.hosts_file import RemoteHost
from drumline.launch.ssh_checks import ready, why_no_answer
from drumline.launch.ssh_plan import Plan
from drumline.launch.ssh_sessions import Line, Session, Show, follow
from drumline.report import tell

# ssh has one exit code for all failures, so its messages have to be parsed.
_SSH_SAYS = re.compile(r"ssh: |Timeout, server|Connection (to|closed|reset)|client_loop: ")
_LAST_LINES = 20
_GRAVITY = (EXIT_USER, EXIT_USAGE, EXIT_FAILED, EXIT_STOPPED, EXIT_INTERRUPTED, 0)
"""Exit code of a run whose hosts exited differently: the first of these that any host has."""
_ENDED = {EXIT_STOPPED: "stopped, everything is saved", EXIT_INTERRUPTED: "interrupted"}


def launch(plan: Plan, *, checks: bool) -> int:
    """Check the hosts, run the command on all of them, report errors, and return the exit code."""
    if checks and (code := ready(plan)):
        return code
    sessions = [Session(host, plan.ssh_line(host), plan.order(host)) for host in plan.hosts]
    stops = follow(sessions, _prefixed(plan.hosts), together=True)
    code, cause = outcome(sessions, plan, stops=stops)
    if cause is not None:
        tell(cause)
    elif code:
        sys.stderr.write(f"{_ENDED[code]}; run the same command again to resume\n")
    return code


def outcome(sessions: Sequence[Session], plan: Plan, *, stops: int) -> tuple[int, DrumlineError | None]:
    """The exit code of the whole run, and the first cause of a failure.

    stops: how often it was asked to stop
    """
    if stops > 1:
        return EXIT_INTERRUPTED, None
    codes = {session: _code(session, asked=stops > 0) for session in sessions}
    code = min(codes.values(), key=_GRAVITY.index)
    if code in (0, EXIT_STOPPED, EXIT_INTERRUPTED):
        return code, None
    causes = [_cause(session, plan) for session, its in codes.items() if its == code]
    return code, min(causes, key=lambda cause: cause.order).error


def _code(session: Session, *, asked: bool) -> int:
    if session.code in (0, *EXIT_CODES):
        return int(session.code or 0)
    if asked and (session.code is None or session.code > 128):
        return EXIT_INTERRUPTED
    return EXIT_FAILED if "started" in session.answers else EXIT_USER


@dataclass(frozen=True)
class _Cause:
    """Why one host failed."""

    error: DrumlineError
    said_s: float
    """When it was reported, by the local clock."""
    is_consequence: bool = False
    """Whether its ranks only lost the ranks of another host."""
    is_unexplained: bool = False
    """Whether another host reports the error: if all hosts make the same mistake, only one prints it."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key: the smallest is the first cause."""
        return self.is_consequence, self.is_unexplained, self.said_s


def _cause(session: Session, plan: Plan) -> _Cause:
    ended_s, lines = session.ended_s or 0.0, [line for line in session.lines if line.stream == "stderr"]
    if session.code is None:
        return _Cause(_lost(session, plan, [line.text for line in lines]), ended_s)
    if session.error is not None:
        is_consequence = session.error["code"] == PeersLostError.code
        return _Cause(_host_error(session.host.name, session.error), ended_s - session.error["ago_s"], is_consequence)
    # Not a DrumlineError: show the traceback, or else the last lines.
    starts = [number for number, line in enumerate(lines) if line.text.startswith("Traceback (")]
    last = lines[starts[-1] :] if starts else lines[-_LAST_LINES:]
    killed = session.code - 128 in signal.valid_signals()
    name = session.host.name
    how = f"was killed by {signal.Signals(session.code - 128).name}" if killed else f"exited with code {session.code}"
    error = DrumlineError(
        f"{name}: drumline {how}",
        details=[line.text for line in last],
        fix="run the same command again to resume" if killed else f"see the output of {name} above",
    )
    return _Cause(error, last[0].heard_s if last else ended_s, is_unexplained=not (starts or killed))


def _lost(session: Session, plan: Plan, said: Sequence[str]) -> DrumlineError:
    """Why a host's exit code is unknown."""
    if "started" not in session.answers:
        finding = why_no_answer(session, plan)
        return DrumlineError(f"{session.host.name}: {finding.what}", fix=finding.fix)
    last = next((f": {text.strip()}" for text in reversed(said) if _SSH_SAYS.match(text)), "")
    fix = "check that the host is up, then run the same command again to resume"
    return DrumlineError(f"the connection to {session.host.name} was lost{last}", fix=fix)


def _host_error(name: str, error: Mapping[str, Any]) -> DrumlineError:
    """A host's own error. A supervisor's error names the host of the rank, which may be another one."""
    names_host = error["code"] in (RunLostError.code, PeersLostError.code)
    problem = error["problem"] if names_host else f"{name}: {error['problem']}"
    return DrumlineError(problem, details=error["details"], fix=error["fix"])


def _prefixed(hosts: Sequence[RemoteHost]) -> Show:
    """Print every line with its host as a prefix, to the stream that it came from."""
    width = max(len(host.name) for host in hosts)

    def show(host: RemoteHost, line: Line) -> None:
        stream = sys.stdout if line.stream == "stdout" else sys.stderr
        try:
            stream.buffer.write(f"{host.name:<{width}} | {line.text}\n".encode())
            stream.buffer.flush()
        except OSError:  # nobody is reading the output, which is no reason to stop a run
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    return show
