"""`srun drumline train` under a real SLURM: a controller and two virtual nodes that live as long as the test."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import small

from drumline.records import read_metrics
from drumline.run_folder import RunFolder

START_LIMIT_S = 60
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
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
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
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


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which `srun` finds a cluster of two nodes; skips the test where there can be none."""
    if os.geteuid() != 0 or any(shutil.which(program) is None for program in PROGRAMS):
        pytest.skip("a SLURM of our own needs root and the Debian packages slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o400)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().split(".")[0], folder=folder, ports=free_ports(3)))
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
                _wait((folder / "munge.socket").exists)
        if not _wait(lambda: _idle(environ) == 2):
            pytest.skip("slurmctld and slurmd do not come up on this machine")
        yield environ
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


def _idle(environ: dict[str, str]) -> int:
    asked = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
    return len(subprocess.run(asked, env=environ, capture_output=True, text=True, check=False).stdout.split())


def _wait(ready: Callable[[], bool]) -> bool:
    limit = time.monotonic() + START_LIMIT_S
    while not ready():
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


def test_srun_on_two_nodes_trains_what_one_process_does(
    slurm: dict[str, str], train: Callable[..., int], tmp_path: Path
) -> None:
    step = ("--batch_size", "2", "--global_batch_size", "12")
    flags = small(*step, "--train_data_path", "text", "--run_dir", "run")
    # The nodes' names are not known to any name server here, as a cluster's are: the meeting point is given.
    environ = {**slurm, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    command = ["srun", "--nodes=2", "--ntasks=3", sys.executable, "-m", "drumline", "train", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "batch_size 2 x 3 ranks x 2 accumulated" in done.stdout and done.stdout.count("finished: ") == 1
    assert RunFolder(tmp_path / "run").read_status()["state"] == "finished"
    assert train(*step, "--run_dir", "alone") == 0
    curves = [
        [r["loss"] for r in read_metrics(tmp_path / run / "metrics.jsonl") if "loss" in r] for run in ("run", "alone")
    ]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)
