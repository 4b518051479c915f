"""The examples, run as their users run them: on two real ranks, by every launcher they name."""

import json
import os
import runpy
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.small import small
from helpers.warm import Warm

from drumline.files.run_folder import RunFolder
from drumline.network.interfaces import free_port
from drumline.report.records import read_metrics

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TIMEOUT_S = 240


def start(where: Path, *words: str) -> subprocess.Popen[str]:
    """Python with these arguments, on the CPU, in a folder that takes all it leaves behind."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "offline",
        "TMPDIR": str(where),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Warm(
        [sys.executable, *words], cwd=where, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def run(where: Path, *commands: list[str]) -> str:
    """Run these at the same time; gives what the first of them said."""
    said = []
    with ExitStack() as stack:
        processes = [stack.enter_context(start(where, *command)) for command in commands]
        try:
            said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.terminate()  # a launcher that hangs takes its ranks with it
    assert [process.returncode for process in processes] == [0] * len(commands), "\n".join(said)
    return said[0]


def run_here(where: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as one rank in this process, which has imported torch already."""
    monkeypatch.chdir(where)
    monkeypatch.setattr(sys, "argv", argv)
    with suppress(SystemExit):
        runpy.run_path(argv[0], run_name="__main__")


def script(name: str, *flags: str) -> list[str]:
    return [str(EXAMPLES / name), *flags]


def finished(folder: Path) -> dict[str, Any]:
    status = RunFolder(folder).read_status()
    assert status["state"] == "finished" and status["step"] == status["total_steps"]
    return status


def losses(folder: Path) -> dict[int, float]:
    finished(folder)
    return {r["step"]: r["loss"] for r in read_metrics(RunFolder(folder).metrics) if "loss" in r}


def sequences_per_step(folder: Path) -> int:
    checkpoint = RunFolder(folder).checkpoint(finished(folder)["step"])
    facts = json.loads((checkpoint / "run.json").read_text())["facts"]
    return int(facts["global_batch_size"])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60
    assert f"{path.name} " in (EXAMPLES / "README.md").read_text()


@pytest.mark.long
def test_train_distributed_gives_one_curve_by_every_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = (np.arange(4000) * 7 % 290).astype("<u2")
    tokens.tofile(tmp_path / "train.bin")
    tokens[:500].tofile(tmp_path / "val.bin")
    data = "--train_data_path train.bin --valid_data_path val.bin --dtype float32 --backend gloo".split()

    def example(run_dir: str, *flags: str) -> list[str]:
        return script("train_distributed.py", *flags, *small(*data), "--run_dir", run_dir)

    launcher = ["-m", "torch.distributed.launch", "--nproc_per_node=2", f"--master_port={free_port()}"]
    wandb = "--use_wandb --wandb_project p --wandb_run_name n".split()
    run(
        tmp_path,
        example("plain", "--gradient_accumulation_steps", "2", *wandb),
        [*TORCHRUN, *example("torchrun", "--distributed", "--gradient_accumulation_steps", "1")],
        [*launcher, *example("launch", "--distributed")],
        example("itself", "--distributed", "--world_size", "2"),
    )
    assert list((tmp_path / "plain/wandb").glob("offline-run-*"))

    resume = ["--resume_from", "torchrun/checkpoints/step-00000004", "--global_batch_size", "8"]
    run_here(tmp_path, example("resumed", *resume), monkeypatch)

    names = ("plain", "torchrun", "launch", "itself", "resumed")
    assert {sequences_per_step(tmp_path / name) for name in names} == {8}  # 4 x 2 ranks, or 4 x 2 accumulated
    curves = {name: losses(tmp_path / name) for name in names}
    assert list(curves["plain"]) == [1, 2, 3, 4, 5, 6] and list(curves["resumed"]) == [5, 6]
    for name, curve in curves.items():
        assert curve == pytest.approx({step: curves["plain"][step] for step in curve}, abs=1e-5), name


def test_ddp_gpt_wikitext2_trains_on_any_text(tmp_path: Path, text: Path) -> None:
    flags = "--epochs 1 --batch_size 2 --vocab_size 300 --dataset text --run_dir run".split()
    said = run(tmp_path, [*TORCHRUN, *script("ddp_gpt_wikitext2.py", *flags)])
    assert sequences_per_step(tmp_path / "run") == 2 * 2
    assert "context 128" in said and "sample:" in said


def test_train_ddp_trains_a_gpt_on_a_dataset_of_dicts(tmp_path: Path) -> None:
    said = run(tmp_path, [*TORCHRUN, *script("train_ddp.py")])
    assert finished(tmp_path / "runs/train_ddp")["step"] == 50
    assert sequences_per_step(tmp_path / "runs/train_ddp") == 8 * 2
    assert said.count("step  10/50 | loss 9.") == 1  # one rank speaks; ln 10000 is 9.21


def test_train_gives_the_same_curve_on_one_rank_and_on_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, [*TORCHRUN, *script("train.py", "--batch_size", "50")])
    run_here(tmp_path, script("train.py", "--batch_size", "100", "--run_dir", "alone"), monkeypatch)
    two, one = losses(tmp_path / "runs/train"), losses(tmp_path / "alone")
    assert list(two) == list(range(10, 101, 10))  # 10 epochs of 1000 samples, 100 a step
    assert two == pytest.approx(one, abs=1e-4)


def test_multi_gpus_starts_its_own_ranks(tmp_path: Path) -> None:
    run(tmp_path, script("multi_gpus.py", "3", "2", "--batch_size", "128", "--nproc", "2", "--run_dir", "run"))
    steps = 2048 // (2 * 128)
    assert finished(tmp_path / "run")["step"] == 3 * steps
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {
        f"step-{epoch * steps:08d}" for epoch in (2, 3)
    }


def test_torchrun_snapshot_goes_on_to_the_weights_of_an_uninterrupted_run_on_two_hosts(tmp_path: Path) -> None:
    meet = ["--nnodes=2", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    hosts = [["-m", "torch.distributed.run", *meet, f"--node_rank={rank}"] for rank in (0, 1)]
    multinode = [[*host, *script("multinode.py", "4", "1")] for host in hosts]
    said = run(tmp_path, *multinode, [*TORCHRUN, *script("torchrun_snapshot.py", "2", "1")])
    assert "rank 0 of 2 is local rank 0 on" in said
    uninterrupted = finished(tmp_path / "runs/multinode")
    half = finished(tmp_path / "runs/torchrun_snapshot")
    said = run(tmp_path, [*TORCHRUN, *script("torchrun_snapshot.py", "4", "1")])
    whole = finished(tmp_path / "runs/torchrun_snapshot")
    assert "resuming from" in said and "(step 4)" in said
    assert (half["step"], whole["step"], uninterrupted["step"]) == (4, 8, 8)
    assert whole["weights_sha256"] == uninterrupted["weights_sha256"] != half["weights_sha256"]
