"""The server that ranks are forked from: forked from the command line's process, or started beside a script's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ranks import TIMEOUT_S
from helpers.small import small

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


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_rank_may_start_processes_and_says_nothing_that_its_launcher_said(tmp_path: Path, when: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", when], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.stderr == ""
    # A file has no lines to wait for: what is printed to it lies in a buffer, which a fork copies.
    assert sorted(done.stdout.splitlines()) == ["codes {0: 0}", "launcher", "rank [0, 0, 0]"]


def test_a_launcher_and_its_ranks_import_torch_once(text: Path, tmp_path: Path) -> None:
    flags = small("--train_data_path", "text", "--total_steps", "2", "--run_dir", str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-m", "drumline", "train", *flags, "--nproc", "2"],
        cwd=text.parent,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported = [line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    # The launcher may load the model's code too, to count what checkpoints will take: once more, but never per rank.
    assert imported.count("torch") == 1 and imported.count("torch._dynamo") <= 2
