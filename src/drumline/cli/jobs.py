"""The command lines of `drumline launch slurm` and `drumline launch k8s`: parse, write, submit, print what's next."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from drumline.launch import Check, K8sConfig, K8sJob, SlurmConfig, SlurmJob, submit, write_file

_Options = Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)]


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
    write_file(job.script, job.text())
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
