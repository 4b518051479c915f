"""A SLURM of our own: a controller and two virtual nodes, each with two GPUs that are none, while a test wants it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 120
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue", "scancel", "scontrol")
CONFIG = """
ClusterName=drumline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
KillWait=5
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4
"""


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `srun` finds a cluster of two nodes; skips the test where there can be none."""
    if os.geteuid() != 0 or any(shutil.which(program) is None for program in PROGRAMS):
        pytest.skip("a SLURM of our own needs root and the Debian packages slurm-wlm and munge")
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().split(".")[0], folder=folder, ports=free_ports(3)))
    (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{file}\n" for file in ("null", "zero")))
    munge = [f"--{name}={folder}/{file}" for name, file in _MUNGE.items()]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", n] for n in ("n1", "n2")),
    ]
    environ = {**os.environ, "SLURM_CONF": str(config)}
    started = []
    try:
        for command in commands:
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append(subprocess.Popen(command, env=environ, **quiet))  # type: ignore[call-overload]
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists)
        if not wait_until(lambda: _idle(environ) == 2):
            pytest.skip("slurmctld and slurmd do not come up on this machine")
        try:
            yield environ
        finally:
            _cancel_all(environ)  # a job outlives the daemons
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(20)


_MUNGE = {
    "key-file": "key",
    "socket": "munge.socket",
    "pid-file": "munge.pid",
    "log-file": "munge.log",
    "seed-file": "munge.seed",
}


def _cancel_all(environ: dict[str, str]) -> None:
    def left() -> bool:
        asked = ["squeue", "--noheader", "--format=%i"]
        numbers = subprocess.run(asked, env=environ, capture_output=True, text=True, check=False).stdout.split()
        if numbers:  # each time: one that is just starting may miss it
            subprocess.run(["scancel", "--quiet", *numbers], env=environ, capture_output=True, check=False)
        return bool(numbers)

    wait_until(lambda: not left())


def _idle(environ: dict[str, str]) -> int:
    asked = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    return len(subprocess.run(asked, env=environ, capture_output=True, text=True, check=False).stdout.split())


def wait_until(ready: Callable[[], bool]) -> bool:
    """Whether it came true in time."""
    limit = time.monotonic() + LIMIT_S
    while not ready():
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True
