"""The command line of `drumline launch`: one run on several hosts, over SSH or as a job of SLURM or Kubernetes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from drumline.launch import Check, K8sConfig, K8sJob, SlurmConfig, SlurmJob, submit, write_file

_Options = Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)]
launch = App(name="launch")


def check_command(words: Sequence[str]) -> None:
    """Parse the hosts' command line here, so that a mistake is reported before anything starts."""
    from drumline.cli.app import parser

    parser().parse_args(list(words), exit_on_error=False, print_error=False)


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


def add_jobs(launch: App, *, check: Check) -> None:
    """Add both commands to `drumline launch`. `check` validates the command line that they will run."""
    launch.command(partial(slurm, check=check), name="slurm")
    launch.command(partial(k8s, check=check), name="k8s")


def slurm(
    *command: str,
    config: Annotated[SlurmConfig, Parameter(name="*")],
    sbatch: _Options = (),
    script: Path | None = None,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    check: Annotated[Check, Parameter(parse=False)],
) -> int:
    """Submit a SLURM job that checkpoints before its time limit or preemption, is requeued, and resumes.

    Parameters
    ----------
    command
        After --: the command to run, as -- train --run_dir /shared/runs/big. bench and doctor work too.
    sbatch
        Extra option for sbatch, as --sbatch=--constraint=h100. May be repeated.
    script
        Path of the job script. Default: next to the run folder, named after the job.
    dry_run
        Print the script and the sbatch command, without writing or submitting anything.
    """
    from drumline.report import print_line

    job = SlurmJob(command, config, script=script, more=sbatch)
    check(job.command.on_each_host())
    if dry_run:
        _print_exactly(f"{job.text()}{shlex.join(job.submission)}\n")
        return 0
    number = submit(job)
    print_line(f"job {number} submitted: {job.script}")
    print_line(f"follow:  tail -F {shlex.quote(str(job.output(number)))}")
    print_line(f"state:   squeue --job {number}")
    print_line(f"cancel:  scancel {number}")
    return 0


def k8s(
    *command: str,
    config: Annotated[K8sConfig, Parameter(name="*")],
    out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    check: Annotated[Check, Parameter(parse=False)],
) -> int:
    """Print a Kubernetes manifest for training, for kubectl apply.

    Parameters
    ----------
    command
        After --: the command to run, as -- train --run_dir /runs/big. bench and doctor work too.
    out
        Output file. Default, or -: standard output.
    """
    from drumline.report import print_line

    job = K8sJob(command, config)
    check(job.command.on_each_host(endpoint=job.endpoint))
    if out is None or str(out) == "-":
        _print_exactly(job.text())
        return 0
    write_file(out, job.text())
    print_line(f"wrote {out}; next:  kubectl apply --filename {shlex.quote(str(out))}")
    return 0


def _print_exactly(text: str) -> None:
    """Print text exactly as it is, without wrapping or emoji."""
    sys.stdout.write(text)
    sys.stdout.flush()


add_ssh(launch, check=check_command)
add_jobs(launch, check=check_command)
