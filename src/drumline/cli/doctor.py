"""The command line of `drumline doctor`, and the quick checks that `drumline train` runs first."""

from __future__ import annotations

import json as json_format
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from drumline.config import RENDEZVOUS_PORT, TrainConfig
from drumline.doctor import Finding, worst
from drumline.errors import EXIT_USER, ConfigError

if TYPE_CHECKING:
    from drumline.doctor import HostsReport, Rendezvous
    from drumline.parallel import Place

_SKIP = "to skip these checks: --doctor off"
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}
_CHECK_WIDTH = 12
_RANK_0_S, _SAY_S = 1800.0, 10.0
"""How long a rank waits for rank 0 on another host, and after how long it prints what it is waiting for."""


def doctor(
    *,
    run_dir: Path = Path("runs"),
    quick: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    nnodes: int = 1,
    rdzv_endpoint: str | None = None,
    data: tuple[Path, ...] = (),
    patience: float = 30.0,
    names: str | None = None,
    hosts: str | None = None,
) -> int:
    """Check this machine, or several hosts and the network between them, and print a fix for each problem.

    For several hosts, use --hosts, or start it on each host the way runs start:
    with torchrun, with srun, or by hand with --nnodes.
    The exit code is 1 if a check failed, else 0.

    Parameters
    ----------
    run_dir
        Folder for runs, whose disk is checked.
    quick
        Run only the checks that `drumline train` runs before training.
    json
        Print only the findings, as JSON.
    nnodes
        Number of hosts. Start the same command on each of them.
    rdzv_endpoint
        HOST:PORT for the rendezvous, on one of the hosts.
    data
        File or folder that should be identical on all hosts. May be repeated.
    patience
        Seconds to wait for the other hosts.
    names
        Names of all hosts, as a,b, so that missing ones can be named.
    hosts
        Run it on these hosts over SSH, as a,b. More options: drumline launch --hosts a,b -- doctor
    """
    if not 0 <= patience < float("inf"):
        raise ConfigError(f"patience is {patience:g}", fix="give --patience a value of 0 or more, in seconds")
    if hosts is not None:
        from drumline.cli.launch import over_ssh

        _check_over_ssh(hosts, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint, names=names, json=json)
        flags = _own_flags(run_dir, data, quick=quick, patience=patience)
        return over_ssh("doctor", *flags, hosts=hosts, rdzv_endpoint=rdzv_endpoint)
    _check_by_hand(nnodes=nnodes, rdzv_endpoint=rdzv_endpoint, names=names)
    environ = dict(os.environ)  # before drumline changes it
    # Must be set before torch is imported: connection problems are reported here, not by torch's warnings.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from drumline.doctor import all_findings, quick_findings

    place = _place()
    rendezvous = None if place is None else _rendezvous(nnodes, rdzv_endpoint, names)
    several = nnodes > 1 or _hosts_of_launcher(environ) > 1
    findings: list[Finding] = []
    speaks = place is None or place.local_rank == 0  # one process per host
    if speaks:
        if quick:
            findings = quick_findings(environ, folder=run_dir, ranks=1, several_hosts=several)
        else:
            findings = all_findings(run_dir, environ, several_hosts=several)
    findings = [replace(finding, host=socket.gethostname()) if several else finding for finding in findings]
    together = None
    if rendezvous is not None:
        from drumline.doctor import check_hosts

        say = (lambda text: None) if json else _say
        together = check_hosts(rendezvous, say=say, patience_s=patience, data=data, collectives=not quick)
    if together is not None and (together.tells or not speaks):
        findings += together.findings
    if speaks or findings:
        _show(findings, as_json=json, alone=not (several or quick))
    if together is not None and not json:
        _show_timings(together)
    return EXIT_USER if worst([*findings, *(together.findings if together else ())]) == "failed" else 0


def _check_by_hand(*, nnodes: int, rdzv_endpoint: str | None, names: str | None) -> None:
    """Raise ConfigError for flags that leave the hosts without a rendezvous."""
    if nnodes < 1:
        raise ConfigError(f"nnodes is {nnodes}", fix="give --nnodes a value of 1 or more")
    where = rdzv_endpoint or f"HOST:{RENDEZVOUS_PORT}"
    if nnodes == 1 and (rdzv_endpoint is not None or names is not None):
        raise ConfigError(
            "--rdzv_endpoint and --names need --nnodes, the number of hosts",
            fix=f"drumline doctor --nnodes {len(names.split(',')) if names else 2} --rdzv_endpoint {where}",
        )
    if nnodes > 1 and rdzv_endpoint is None:
        raise ConfigError(
            f"--nnodes {nnodes} needs a rendezvous endpoint on one of the hosts",
            fix=f"drumline doctor --nnodes {nnodes} --rdzv_endpoint {where}",
        )


def _check_over_ssh(hosts: str, *, nnodes: int, rdzv_endpoint: str | None, names: str | None, json: bool) -> None:
    """Raise ConfigError for flags that do not work with --hosts."""
    from drumline.launch import parse_hosts

    remote_hosts = parse_hosts(hosts)
    if json:
        where = rdzv_endpoint or f"{remote_hosts[0].name}:{RENDEZVOUS_PORT}"
        several = f" --nnodes {len(remote_hosts)} --rdzv_endpoint {where}" if len(remote_hosts) > 1 else ""
        raise ConfigError(
            "--json cannot be combined with --hosts, which mixes the output of all hosts",
            fix=f"on each host: drumline doctor{several} --json",
        )
    if nnodes != 1 or names is not None:
        raise ConfigError(
            f"--nnodes and --names are for hosts started by hand; --hosts already lists {len(remote_hosts)}",
            fix=f"drumline doctor --hosts {hosts}",
        )


def _own_flags(run_dir: Path, data: tuple[Path, ...], *, quick: bool, patience: float) -> list[str]:
    """The flags to pass to the doctor on every host."""
    flags = ["--run_dir", str(run_dir), "--patience", str(patience)]
    flags += [word for path in data for word in ("--data", str(path))]
    return [*flags, *(["--quick"] if quick else [])]


def _rendezvous(nnodes: int, rdzv_endpoint: str | None, names: str | None) -> Rendezvous | None:
    """The rendezvous with the other hosts; None if there are none."""
    from drumline.doctor import find_rendezvous, rendezvous_at

    if nnodes == 1 or rdzv_endpoint is None:
        return find_rendezvous(os.environ)
    return rendezvous_at(rdzv_endpoint, hosts=nnodes, names=names.split(",") if names else ())


def _show_timings(report: HostsReport) -> None:
    """Print all-reduce timings over all hosts and by pair; on other hosts, only where to find the report."""
    if not report.tells:
        if any(finding.state != "ok" for finding in report.findings):
            _say(f"problems were found between the hosts: see the output of {report.names[min(report.names)]}")
        return
    from drumline.doctor import PAIR_COLUMNS, SIZE_COLUMNS
    from drumline.report import print_line, print_table

    for timings in report.timings:
        print_line(f"\n{timings.backend}, all {len(report.names)} hosts and each pair:")
        print_table(SIZE_COLUMNS, timings.size_rows())
        print_table(PAIR_COLUMNS, timings.pair_rows(report.names))


def _place() -> Place | None:
    """The rank and world size that a launcher gave this process; None if torch cannot be imported."""
    try:
        from drumline.parallel import find_place
    except (ImportError, OSError):
        return None
    return find_place(os.environ)


def _hosts_of_launcher(environ: Mapping[str, str]) -> int:
    """The number of hosts according to torchrun's or srun's environment variables."""
    said = environ.get("GROUP_WORLD_SIZE") or environ.get("SLURM_STEP_NUM_NODES") or "1"
    return int(said) if said.isdigit() else 1


def _show(findings: Sequence[Finding], *, as_json: bool, alone: bool) -> None:
    if as_json:
        report = {
            "host": socket.gethostname(),
            "state": worst(findings),
            "findings": [finding.as_dict() for finding in findings],
        }
        sys.stdout.write(json_format.dumps(report, indent=2) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(emoji=False)  # fe80::b:1 is an address, not an emoji
    for finding in findings:
        state, style = f"{finding.state:<8}", _STYLES[finding.state]
        where = f"{finding.host}: " if finding.host else ""
        line = Text.assemble((state, style), f" {finding.check:<{_CHECK_WIDTH}} {where}{finding.what}")
        console.print(line, soft_wrap=True)
        if finding.state != "ok" and finding.fix:
            console.print(Text(f"{'':8} {'':{_CHECK_WIDTH}} fix: {finding.fix}"), soft_wrap=True)
    failed, warned = (sum(finding.state == state for finding in findings) for state in ("failed", "warning"))
    _say(f"{len(findings)} checks: {failed} failed, {warned} {'warning' if warned == 1 else 'warnings'}")
    if alone:
        _say("to check several hosts, on each: drumline doctor --nnodes 2 --rdzv_endpoint HOST:29400")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check_first(config: TrainConfig, *, ranks: int) -> None:
    """Run the quick checks before a run: print warnings to stderr, raise ConfigError for what cannot work.

    ranks: number of ranks to start here; 0 if this process trains itself
    """
    from drumline.doctor import findings_before
    from drumline.parallel import find_place

    place = find_place(os.environ)
    if place.local_rank > 0:
        return
    _find_rank_0()
    findings = [f for f in findings_before(config, place, ranks=ranks) if f.state != "ok"]
    # A rank that exits before the rendezvous would leave the others waiting: they fail together later instead.
    fatal = [finding for finding in findings if finding.state == "failed" and place.size == 1]
    warned = [finding for finding in findings if finding not in fatal]
    for finding in warned:
        sys.stderr.write(f"warning: {finding.sentence}\n  fix: {finding.fix}\n")
    if fatal:
        first, *others = fatal
        raise ConfigError(
            first.sentence,
            fix=first.fix,
            details=[*(f"{finding.sentence}: {finding.fix}" for finding in others), _SKIP],
        )
    if warned:
        sys.stderr.write(f"{_SKIP}\n")


def _find_rank_0() -> None:
    """On hosts other than rank 0's, report why rank 0 cannot be reached; torch would wait silently."""
    from drumline.doctor import CheckEndedError, approach, find_rendezvous

    rendezvous = find_rendezvous(os.environ)
    if rendezvous is None or rendezvous.keeps:
        return

    def say(text: str) -> None:
        sys.stderr.write(f"{socket.gethostname()}: {text}\n")

    try:
        approach(replace(rendezvous, task="run"), patience_s=_RANK_0_S, say=say, say_every_s=_SAY_S)
    except CheckEndedError as ended:
        raise ConfigError(ended.finding.what, fix=ended.finding.fix) from None
