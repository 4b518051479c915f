"""`srun drumline train` under a real SLURM: a controller and two virtual nodes that live as long as the test."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.slurm import two_nodes
from helpers.small import small

from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

pytestmark = pytest.mark.needs("slurm")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with two_nodes(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


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


def test_srun_lets_the_doctors_of_two_nodes_meet_and_one_tells_for_both(slurm: dict[str, str], tmp_path: Path) -> None:
    environ = {**slurm, "MASTER_ADDR": "127.0.0.1"}
    command = ["srun", "--label", "--nodes=2", "--ntasks=2", sys.executable, "-m", "drumline", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=200)
    said = [line.split(": ", 1) for line in done.stdout.splitlines()]
    first, second = (json.loads("\n".join(line for of, line in said if of == task))["findings"] for task in "01")
    between = {finding["check"]: finding["what"] for finding in first}
    assert between["rendezvous"].startswith("2 hosts joined at 127.0.0.1:")
    assert between["reach"] == "all 2 hosts reach each other in both directions"
    assert {"rendezvous", "reach"}.isdisjoint(finding["check"] for finding in second)
    # Both nodes are this machine, and what its name stands for decides whether that is all right.
    assert done.returncode == int(any(finding["state"] == "failed" for finding in first))
