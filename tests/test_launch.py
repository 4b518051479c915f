"""Every way to start ranks on one machine trains the same run, and none leaves a process behind."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conftest import small

from drumline.cluster import check_backend, find_place
from drumline.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError
from drumline.launch import meeting_port
from drumline.records import read_metrics
from drumline.run_folder import RunFolder

TIMEOUT_S = 120
FLAGS = small("--train_data_path", "text", "--global_batch_size", "16", "--save_every", "1")
PYTHON = [sys.executable, "-m"]
TORCHRUN = [*PYTHON, "torch.distributed.run"]
DRUMLINE = ["-m", "drumline", "train"]
LAUNCHES = {
    "python -m drumline": [*PYTHON, "drumline", "train"],
    "drumline": [str(Path(sys.executable).with_name("drumline")), "train"],
    "--nproc": [*PYTHON, "drumline", "train", "--nproc", "2"],
    "torchrun": [*TORCHRUN, "--nproc_per_node=2", "--master_port=PORT", *DRUMLINE],
    "torchrun --standalone": [*TORCHRUN, "--standalone", "--nproc_per_node=3", *DRUMLINE],
    "launch": [*PYTHON, "torch.distributed.launch", "--nproc_per_node=2", "--master_port=PORT", *DRUMLINE],
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], where: Path, **environ: str) -> subprocess.Popen[str]:
    command = [word.replace("PORT", str(free_port())) for word in command]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return subprocess.Popen(
        command,
        cwd=where,
        env={**clean, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with text, and the losses of one process that trains on it."""
    where = tmp_path_factory.mktemp("launch")
    (where / "text").mkdir()
    for number in range(30):
        (where / "text" / f"{number}.txt").write_text(f"Document {number}. " + "All work and no play. " * 12)
    process = start([*LAUNCHES["drumline"], *FLAGS, "--run_dir", "one"], where)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return where, losses(where / "one")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize("name", [name for name in LAUNCHES if name != "drumline"])
def test_every_launch_trains_the_same_curve(reference: tuple[Path, list[float]], name: str, tmp_path: Path) -> None:
    where, expected = reference
    process = start([*LAUNCHES[name], *FLAGS, "--run_dir", str(tmp_path / "run")], where)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert out.count("finished: ") == 1


def test_ctrl_c_stops_all_ranks_at_a_saved_step_and_leaves_no_process(
    reference: tuple[Path, list[float]], tmp_path: Path
) -> None:
    flags = small("--train_data_path", "text", "--global_batch_size", "16", "--total_steps", "100000")
    command, scratch = [*LAUNCHES["--nproc"], *flags, "--run_dir", str(tmp_path / "run")], tmp_path / "scratch"
    scratch.mkdir()
    with start(command, reference[0], TMPDIR=str(scratch)) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "| loss" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
        process.wait(TIMEOUT_S)
    assert process.returncode == EXIT_STOPPED
    assert "everything is saved; to go on" in out
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == [] and {path.name.split("_")[0] for path in scratch.iterdir()} <= {"torchinductor"}  # a cache
    status = RunFolder(tmp_path / "run").read_status()
    assert status["state"] == "stopped" and RunFolder(tmp_path / "run").checkpoint(status["step"]).exists()


def test_a_rank_that_is_killed_is_named_and_ends_the_run(reference: tuple[Path, list[float]], tmp_path: Path) -> None:
    with _killed_once(reference[0], tmp_path / "run", "100000") as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_FAILED
    lines = [line for line in err.splitlines() if line.startswith(("error:", "  fix:"))]
    assert "SIGKILL" in lines[0] and "rank 1" in lines[0] and "start the same command again" in lines[1]


def test_with_max_restarts_a_killed_rank_is_started_again_and_the_run_ends_as_if_undisturbed(
    reference: tuple[Path, list[float]], tmp_path: Path
) -> None:
    with _killed_once(reference[0], tmp_path / "run", "300", "--max_restarts", "3") as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert len(losses(tmp_path / "run")) == 300
    assert RunFolder(tmp_path / "run").read_status()["state"] == "finished"


def _killed_once(where: Path, run: Path, steps: str, *flags: str) -> subprocess.Popen[str]:
    """A run on two ranks whose rank 1 is killed -9 after its first steps."""
    more = small("--train_data_path", "text", "--global_batch_size", "16", "--total_steps", steps, *flags)
    process = start([*LAUNCHES["--nproc"], *more, "--run_dir", str(run)], where)
    assert process.stdout is not None
    for line in process.stdout:
        if "| loss" in line:
            break
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()
    return process


def test_a_mistake_under_several_ranks_is_told_once(reference: tuple[Path, list[float]], tmp_path: Path) -> None:
    process = start([*LAUNCHES["--nproc"], "--train_data_path", "nowhere.txt"], reference[0])
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert err.splitlines() == [line for line in err.splitlines() if line.startswith(("error:", "  fix:"))]
    assert err.count("error:") == 1 and "nowhere.txt" in err


FUNCTION = """
import sys
from drumline.errors import ConfigError
from drumline.launch import start_ranks
def work(kind):
    raise ConfigError("two drums", fix="take one") if kind == "mistake" else ValueError("boom")
if __name__ == "__main__":
    sys.exit(start_ranks(work, (sys.argv[1],), nproc=2))
"""


@pytest.mark.parametrize(("kind", "code", "said"), [("mistake", 1, "error: two drums"), ("bug", 3, "ValueError: boom")])
def test_a_function_that_fails_as_a_rank_says_why(tmp_path: Path, kind: str, code: int, said: str) -> None:
    (tmp_path / "work.py").write_text(FUNCTION)
    process = start([sys.executable, "work.py", kind], tmp_path)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code and said in err


def test_nccl_without_gpus_is_refused_at_once_and_gloo_is_named(reference: tuple[Path, list[float]]) -> None:
    process = start([*LAUNCHES["--nproc"], *FLAGS, "--backend", "nccl"], reference[0])
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1 and "--backend gloo" in err and err.count("error:") == 1


def test_a_master_port_in_use_is_replaced_on_one_machine() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert meeting_port(str(taken.getsockname()[1])) == 0
    port = free_port()
    assert meeting_port(str(port)) == port and meeting_port(None) == 0


def test_variables_that_are_not_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="the variable WORLD_SIZE is 'two'"):
        find_place({"RANK": "0", "WORLD_SIZE": "two"})


def test_backends_follow_the_device() -> None:
    import torch

    assert check_backend("auto", torch.device("cpu")) == "gloo"
    assert check_backend("auto", torch.device("cuda")) == "nccl"
    assert check_backend("gloo", torch.device("cuda")) == "gloo"
