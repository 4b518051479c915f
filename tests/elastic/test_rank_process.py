"""The server that ranks are forked from: forked from the command line's process, or started beside a script's."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.launchers import rank_process
from helpers.ranks import TIMEOUT_S
from helpers.small import small

from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

SCRIPT = """
import multiprocessing, os, sys, time
from drumline.elastic import rank_process as forked

def nothing():
    pass

def work():
    codes = []
    for method in ("fork", "forkserver", "spawn"):
        child = multiprocessing.get_context(method).Process(target=nothing)
        child.start()
        child.join()
        codes.append(child.exitcode)
    work.lock = multiprocessing.RLock()  # as tqdm has one, which torch.compile imports
    print("rank", codes, flush=True)

if __name__ == "__main__":
    print("launcher")
    forked.start_server(1, early=sys.argv[1] == "early")
    ranks = forked.Ranks()
    ranks.start(0, {**os.environ, "RANK": "0"}, work)
    while None in ranks.codes().values():
        time.sleep(0.01)
    print("codes", ranks.codes())
"""

DYING = """
import os, signal
from multiprocessing import forkserver
from drumline.elastic import rank_process as forked

if __name__ == "__main__":
    forked.start_server(1)
    read = forkserver.read_signed

    def dying(fd):
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        return read(fd)

    forkserver.read_signed = dying
    ranks = forked.Ranks()
    ranks.start(0, dict(os.environ), print)
    ranks.kill()
    print(ranks.codes(), forked.server_end() == (forkserver._forkserver._forkserver_pid, -signal.SIGKILL))
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_rank_may_start_processes_and_says_nothing_that_its_launcher_said(tmp_path: Path, when: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", when], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stderr == ""
    # A file has no lines to wait for: what is printed to it lies in a buffer, which a fork copies.
    assert sorted(done.stdout.splitlines()) == ["codes {0: 0}", "launcher", "rank [0, 0, 0]"]


def test_a_server_that_dies_while_it_starts_a_rank_is_known_to_have_died(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DYING)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert (done.stdout, done.stderr) == ("{0: 255} True\n", "")


def train(where: Path, run: str, *, nproc: int = 2, steps: int = 2) -> subprocess.Popen[str]:
    flags = small("--train_data_path", "text", "--total_steps", str(steps), "--run_dir", run)
    return subprocess.Popen(
        [sys.executable, "-m", "drumline", "train", *flags, "--global_batch_size", "8", "--nproc", str(nproc)],
        cwd=where,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        stdout=subprocess.DEVNULL,
        stderr=(where / f"{run}.err").open("w"),
        text=True,
    )


def imported_and_said(where: Path, run: str) -> tuple[list[str], str]:
    lines = (where / f"{run}.err").read_text().splitlines()
    imports = [line for line in lines if line.startswith("import time:")]
    return [line.rsplit("|", 1)[-1].strip() for line in imports], "\n".join(
        each for each in lines if each not in imports
    )


def test_a_launcher_and_its_ranks_import_torch_once(text: Path, tmp_path: Path) -> None:
    assert train(tmp_path, "run").wait(TIMEOUT_S) == 0
    imported, said = imported_and_said(tmp_path, "run")
    # The launcher may load the model's code too, to count what checkpoints will take: once more, but never per rank.
    assert imported.count("torch") == 1 and imported.count("torch._dynamo") <= 2 and said == ""


@pytest.mark.needs_shm
def test_a_server_that_is_killed_is_named_and_another_takes_its_place_without_importing_torch(
    text: Path, tmp_path: Path
) -> None:
    assert train(tmp_path, "calm", steps=100).wait(TIMEOUT_S) == 0
    launcher, metrics = train(tmp_path, "run", steps=100), tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while not metrics.exists() or not read_metrics(metrics):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    server = psutil.Process(rank_process(launcher.pid, 1).ppid())
    os.kill(server.pid, signal.SIGKILL)
    assert launcher.wait(TIMEOUT_S) == 0
    imported, said = imported_and_said(tmp_path, "run")
    assert said.startswith("the process that ranks are forked from on ")
    assert f" (process {server.pid}) was killed by SIGKILL at step " in said and said.endswith("; restarting (1)")
    assert imported.count("torch") == 1
    runs = [RunFolder(tmp_path / run).read_status() for run in ("calm", "run")]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"] and runs[1]["state"] == "finished"
