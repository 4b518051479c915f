"""A SLURM of our own: a controller and two virtual nodes, each with two GPUs that are none, while a test wants it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from drumline.network import free_port

LIMIT_S, UP_S = 120.0, 60.0
"""How long anything may take, and a cluster until it is there: it is tried twice."""
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


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which `srun` finds a cluster of two nodes, for tests marked `needs("slurm")`."""
    with contextlib.ExitStack() as daemons:
        try:
            environ = daemons.enter_context(_started(folder / "first"))
        except DidNotComeUpError:  # another program may have taken one of the ports since they were chosen
            environ = daemons.enter_context(_started(folder / "second"))
        try:
            yield environ
        finally:
            _cancel_all(environ)  # a job outlives the daemons


class DidNotComeUpError(Exception):
    """What the daemons wrote, instead of a cluster."""


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[dict[str, str]]:
    """A controller and two nodes that are ready, with all their files in a folder."""
    (folder / "state").mkdir(parents=True)
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o400)
    config = folder / "slurm.conf"
    ports, host = [free_port() for _ in range(3)], socket.gethostname().split(".")[0]
    config.write_text(CONFIG.format(host=host, folder=folder, ports=ports))
    (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{file}\n" for file in ("null", "zero")))
    munge = [f"--{name}={folder}/{file}" for name, file in _MUNGE.items()]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", n] for n in ("n1", "n2")),
    ]
    environ = {**os.environ, "SLURM_CONF": str(config)}
    started: list[subprocess.Popen[bytes]] = []

    def comes(ready: Callable[[], bool]) -> None:
        wait_until(lambda: ready() or any(each.poll() is not None for each in started), limit_s=UP_S)
        if not ready():
            raise DidNotComeUpError(_tails(folder))

    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}-{command[0]}.log").open("wb") as said:
                started.append(
                    subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
                )
            if command[0] == "munged":
                comes((folder / "munge.socket").exists)
        comes(lambda: _idle(environ) == 2)
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tails(folder: Path) -> str:
    """The last lines of all logs."""
    return "\n".join(
        f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-20:])
        for path in sorted(folder.glob("*.log"))
    )


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
    said = subprocess.run(asked, env=environ, capture_output=True, text=True, check=False).stdout
    return len(set(said.split()))  # once for each partition


def wait_until(ready: Callable[[], bool], *, limit_s: float = LIMIT_S) -> bool:
    """Whether it came true in time."""
    limit = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True
