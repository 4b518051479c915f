"""The command line of `drumline launch`: one run, started on several hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from drumline.cli.jobs import add_jobs
from drumline.launch import Check

launch = App(name="launch")


def check_command(words: Sequence[str]) -> None:
    """Parse the hosts' command line here, so that a mistake is reported before anything starts."""
    from drumline.cli.app import app

    app.parse_args(list(words), exit_on_error=False, print_error=False)


def add_ssh(launch: App, *, check: Check) -> None:
    """Make SSH the default command of `drumline launch`. `check` validates the command line that hosts will run."""
    launch.default(partial(over_ssh, check=check))


def over_ssh(
    *command: str,
    hosts: str | None = None,
    hostfile: Path | None = None,
    nproc: int | None = None,
    ssh: str = "ssh",
    rdzv_endpoint: str | None = None,
    workdir: Path | None = None,
    python: Annotated[str, Parameter(show_default=False)] = sys.executable,
    env: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    skip_checks: Annotated[bool, Parameter(negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    check: Annotated[Check | None, Parameter(parse=False)] = None,
) -> int:
    """Start one run on several hosts over SSH: drumline launch --hosts a,b -- train --run_dir /shared/run

    The hosts are checked first. Each line of output is prefixed with its host.
    If the run fails, the first failure is reported last.
    Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops immediately.

    Parameters
    ----------
    command
        After --: train, bench or doctor, with its flags. bench runs on each host by itself.
    hosts
        Hosts, as a,b; or with the number of ranks, as a:4,user@b:8.
    hostfile
        File with one host per line, as a slots=4 or a:4, instead of --hosts.
    nproc
        Number of ranks on hosts without a number of their own. Default: one per GPU.
    ssh
        SSH command, as "ssh -p 2222 -i KEY".
    rdzv_endpoint
        HOST:PORT for the rendezvous. Default: the first host, port 29400.
    workdir
        Working directory on every host. Default: the current one.
    python
        Python interpreter on every host. Default: this one.
    env
        Environment variable to pass on, besides NCCL_*, TORCH_*, OMP_*, HF_*, WANDB_* and proxies. May be repeated.
    skip_checks
        Start without checking the hosts first.
    dry_run
        Print the command for each host, without running it.
    """
    from drumline.launch import describe, make_plan, passed_on
    from drumline.launch import launch as start

    plan = make_plan(
        command,
        hosts=hosts,
        hostfile=hostfile,
        nproc=nproc,
        ssh=ssh,
        rdzv_endpoint=rdzv_endpoint,
        workdir=workdir,
        python=python,
        environ=passed_on(os.environ, env),
    )
    if check is not None:
        check(plan.words(plan.hosts[0]))
    if not dry_run:
        return start(plan, checks=not skip_checks)
    sys.stdout.write("\n".join(describe(plan, checks=not skip_checks)) + "\n")
    return 0


add_ssh(launch, check=check_command)
add_jobs(launch, check=check_command)
