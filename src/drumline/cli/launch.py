"""The command line of `drumline launch`: one run, started on several hosts."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from drumline.launch import Check

launch = App(name="launch")


def add_ssh(launch: App, *, check: Check) -> None:
    """Make hosts over SSH what `drumline launch` is about. `check` judges what they are to run."""
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

    The hosts are checked first. Every line that they say is shown with the host's name, and a failure ends with its
    first cause. Ctrl-C lets the run save and stop, a second one ends it at once.

    Parameters
    ----------
    command
        After --: train, bench or doctor, with its flags. Hosts train one run or check each other; bench is for each.
    hosts
        Where: a,b, or a:4,user@b:8 with the number of ranks.
    hostfile
        Or a file with a host on each line: a slots=4, or a:4.
    nproc
        Ranks on each host that does not say. Default: one per GPU.
    ssh
        How to call ssh, as "ssh -p 2222 -i KEY".
    rdzv_endpoint
        HOST:PORT where the hosts meet. Default: the first one, port 29400.
    workdir
        The folder to start in, on every host. Default: this one.
    python
        The Python to start there. Default: this one.
    env
        A variable to pass on besides NCCL_*, TORCH_*, OMP_*, HF_*, WANDB_*, proxies and their like. May be repeated.
    skip_checks
        Start without looking at the hosts first.
    dry_run
        Show what would be run on each host, and run nothing.
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
