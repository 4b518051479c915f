"""A SLURM job that requeues itself: an sbatch script whose run saves and is requeued before its time limit.

SLURM signals the job's steps, not the script: SIGUSR1 before the time limit, SIGTERM at preemption. Both reach every
process of a step. drumline saves and exits with 75, the script requeues the job, and the same command resumes from the
run folder. Cancelling a job ends the script too, so it is not requeued.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, DrumlineError
from drumline.files import RunFolder
from drumline.launch.job_command import JobCommand, write_file
from drumline.network import SECRET

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d{1,2}){0,2})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]*")
_LONGEST_WARNING_S = 65535
_LAST_HOST_S = 600
"""How long the other hosts may take to save after the first one has exited; after that, they are killed."""
_KILLED_EARLY = (128 + 10, 128 + 15)
"""srun's exit codes for tasks that SIGUSR1 or SIGTERM killed before drumline had installed its handlers."""

_AFTER_TRAINING = """\
code=$?
case $code in
{stopped})  # stopped by a signal: the time limit is near, or the job is preempted
    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {max_requeues} ]; then
        echo "drumline: stopped (exit code $code); job $SLURM_JOB_ID is requeued and will resume"
        scontrol requeue "$SLURM_JOB_ID" && exit $code  # requeueing may kill this script before it gets to exit
    fi
    echo "drumline: stopped (exit code $code) after ${{SLURM_RESTART_COUNT:-0}} restarts; to resume: sbatch" {script} ;;
{failed}) echo "drumline: the run failed, see" {status} "; to resume: sbatch" {script} ;;
esac
exit $code
"""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Resources and limits of a SLURM job."""

    nodes: int
    """Number of hosts."""
    gpus_per_node: int
    """GPUs per host, with one rank each. 0: hosts without GPUs."""
    time: str | None = None
    """Time limit, as in sbatch: 24:00:00. Default: the partition's."""
    partition: str | None = None
    """Partition. Default: the cluster's."""
    account: str | None = None
    """Account to charge."""
    cpus_per_task: int | None = None
    """CPUs per host, shared by its ranks. Default: the cluster's setting."""
    job_name: str | None = None
    """Job name. Default: the name of the run folder."""
    warn_s: int = 120
    """Seconds before the time limit at which the run saves and stops."""
    max_requeues: int = 100
    """Number of times that the job may be requeued."""

    def __post_init__(self) -> None:
        if self.job_name is not None and not _NAME.fullmatch(self.job_name):
            raise ConfigError(
                f"--job_name {self.job_name!r} cannot be used as a file name",
                fix=f"as in --job_name {_name_of(self.job_name)}",
            )
        if self.cpus_per_task is not None and self.cpus_per_task < 1:
            raise ConfigError(
                f"--cpus_per_task {self.cpus_per_task} is not a number of CPUs", fix="as in --cpus_per_task 64"
            )
        if not 0 <= self.warn_s <= _LONGEST_WARNING_S:
            raise ConfigError(
                f"--warn_s {self.warn_s} is not between 0 and {_LONGEST_WARNING_S:,}, SLURM's limits",
                fix="as in --warn_s 120",
            )
        if self.max_requeues < 0:
            raise ConfigError(f"--max_requeues {self.max_requeues} is below 0", fix="as in --max_requeues 100")
        if seconds_of(self.time) <= self.warn_s:
            raise ConfigError(
                f"--time {self.time} is {seconds_of(self.time):,.0f} s: stopping {self.warn_s} s before its end "
                "leaves no time to train",
                fix="raise --time, or lower --warn_s to the time that saving takes",
            )


class SlurmJob:
    """A drumline command as an sbatch job."""

    def __init__(
        self, words: Sequence[str], config: SlurmConfig, *, script: Path | None = None, more: Sequence[str] = ()
    ) -> None:
        """script: path of the sbatch script; None: next to the run folder. more: extra options for sbatch"""
        self.command = JobCommand(words=tuple(words), nodes=config.nodes, gpus_per_node=config.gpus_per_node)
        self.config = config
        run_dir = Path(self.command.run_dir).absolute() if self.command.run_dir else None
        self.name = config.job_name or _name_of(run_dir.name if run_dir else f"drumline-{words[0]}")
        beside = run_dir.parent if run_dir else Path.cwd()
        self.script = (script or beside / f"{self.name}.sbatch").absolute()
        for option in more:
            if not option.startswith("-") or not option.isprintable():
                raise ConfigError(f"--sbatch {option!r} is no sbatch option", fix="as in --sbatch=--constraint=h100")
        self._more = tuple(more)

    def text(self) -> str:
        """The script."""
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in self._options())]
        lines += [
            "# Written by drumline launch slurm.",
            "set -u",
            *self._threads(),
            *self._secret(),
            shlex.join(self.argv()),
        ]
        if not self.command.is_training:
            return "\n".join([*lines, "exit $?"]) + "\n"
        stopped = "|".join(map(str, (EXIT_STOPPED, EXIT_INTERRUPTED, *_KILLED_EARLY)))
        ending = _AFTER_TRAINING.format(
            stopped=stopped,
            failed=EXIT_FAILED,
            max_requeues=self.config.max_requeues,
            script=shlex.quote(str(self.script)),
            status=shlex.quote(str(RunFolder(Path(self.command.run_dir or "")).status)),
        )
        return "\n".join([*lines, ending])

    @property
    def submission(self) -> list[str]:
        """The sbatch command line."""
        return ["sbatch", "--parsable", str(self.script)]

    def output(self, number: str) -> Path:
        """The log file of a job."""
        return self.script.parent / f"{self.name}-{number}.out"

    def _options(self) -> list[str]:
        command, config = self.command, self.config
        options = {
            "job-name": self.name,
            "nodes": str(command.nodes),
            "ntasks-per-node": str(self._tasks_per_node),
            "gpus-per-node": str(command.gpus_per_node) if command.gpus_per_node else None,
            "cpus-per-task": str(config.cpus_per_task) if config.cpus_per_task else None,
            "time": config.time,
            "partition": config.partition,
            "account": config.account,
            "chdir": str(Path.cwd()),  # the run folder and other paths may be relative
            "output": str(self.output("")).replace("%", "%%").removesuffix(".out") + "%j.out",
            "open-mode": "append",
        }
        lines = [f"--{name}={quoted(name, value)}" for name, value in options.items() if value is not None]
        again = ["--requeue", f"--signal=USR1@{config.warn_s}"] if command.is_training else ["--no-requeue"]
        return [*lines, *again, *self._more]

    @property
    def _tasks_per_node(self) -> int:
        """One, which starts the host's ranks; with `bench` on several hosts, srun starts the ranks itself."""
        several = self.command.words[0] == "bench" and self.command.nodes > 1
        return max(1, self.command.gpus_per_node) if several else 1

    def _threads(self) -> list[str]:
        share = f"SLURM_CPUS_ON_NODE / {self.command.ranks_per_node}"
        return [f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(({share} > 0 ? {share} : 1))}}"']

    def _secret(self) -> list[str]:
        """Made when the job runs, so that no file has it; srun gives it to all hosts."""
        make = "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
        return [f'export {SECRET}="${{{SECRET}:-{make}}}"'] if self.command.nodes > 1 else []

    def argv(self) -> list[str]:
        """The srun command line that starts drumline on all hosts."""
        # No CPU binding: the ranks of a task share all CPUs that the job has on the host.
        srun = ["srun", f"--wait={_LAST_HOST_S}", "--cpu-bind=none"]
        if self.config.cpus_per_task:
            srun.append(f"--cpus-per-task={self.config.cpus_per_task}")  # srun does not inherit it from sbatch
        if self._tasks_per_node > 1 or self.command.words[0] == "doctor":
            # Ranks, or hosts to check: they connect through srun's variables.
            return [*srun, sys.executable, "-m", "drumline", *self.command.words]
        # With these variables, the task would think that it is a rank; it starts the ranks instead.
        not_a_rank = ["env", "--unset=SLURM_PROCID", "--unset=SLURM_STEP_NUM_TASKS"]
        return [*srun, *not_a_rank, sys.executable, "-m", "drumline", *self.command.on_each_host()]


def seconds_of(time: str | None) -> float:
    """A SLURM time limit, from 90 (minutes) to 1-12:00:00, in seconds; infinite if there is none."""
    if time is None or time.upper() in ("INFINITE", "UNLIMITED"):
        return math.inf
    match = _TIME.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"--time {time!r} is not a time limit",
            fix="as in --time 24:00:00 (hours), 90 (minutes) or 3-12 (days and hours)",
        )
    parts = [int(part) for part in match["parts"].split(":")]
    # 90 and 90:00 start with minutes, 1:30:00 with hours; after days come hours.
    first = 3600 if match["days"] or len(parts) == 3 else 60
    return int(match["days"] or 0) * 86400 + sum(part * first / 60.0**place for place, part in enumerate(parts))


def quoted(name: str, value: str) -> str:
    """A value for an #SBATCH line, where quotes and backslashes work as in JSON."""
    if not value.isprintable():
        raise ConfigError(f"--{name} {value!r} cannot be written to an sbatch script", fix="use printable characters")
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _name_of(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "drumline"


_NO_CONTROLLER = re.compile(r"controller|unknown host|connection refused|configuration source|connect failure", re.I)


def submit(job: SlurmJob) -> str:
    """Write the script and submit it; returns the job id. A script that sbatch refuses is not left behind."""
    command = job.submission
    before = job.script.read_text(encoding="utf-8") if job.script.is_file() else None
    missing = [folder for folder in job.script.parents if not folder.exists()]
    write_file(job.script, job.text())
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"sbatch is not installed on {socket.gethostname()}; {job.script} was written",
            fix=f"on a host of the cluster: sbatch {shlex.quote(str(job.script))}   (to only print it: --dry_run)",
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        _take_back(job.script, before, missing)
        said = next((line for line in done.stderr.splitlines() if line.strip()), f"exit code {done.returncode}")
        fix = "correct the option; extra sbatch options: --sbatch=--OPTION=VALUE"
        if _NO_CONTROLLER.search(done.stderr):
            fix = (
                f"{socket.gethostname()} cannot reach the SLURM controller: submit from a host of the cluster that can"
            )
        raise DrumlineError(
            f"sbatch refused {job.script}: {said.removeprefix('sbatch: ').removeprefix('error: ')}", fix=fix
        )
    return done.stdout.strip().split(";")[0]


def _take_back(script: Path, before: str | None, missing: Sequence[Path]) -> None:
    """Leave everything as it was before the script was written. missing: folders that were made, the innermost first"""
    with suppress(OSError):
        if before is not None:
            write_file(script, before)
            return
        script.unlink()
        for folder in missing:
            folder.rmdir()
