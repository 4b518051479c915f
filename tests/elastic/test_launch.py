"""Every way to start ranks on one machine trains the same run, and none leaves a process behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.launchers import rank_process, wait_until_gone, wait_until_it_catches
from helpers.small import small
from helpers.warm import Warm

from drumline.elastic.launch import rendezvous_port
from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError
from drumline.files.run_folder import RunFolder
from drumline.network.interfaces import free_port
from drumline.parallel import group
from drumline.parallel.group import check_backend
from drumline.parallel.place import find_place
from drumline.parallel.world import Place
from drumline.report.records import read_metrics

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


def start(command: list[str], where: Path, **environ: str) -> subprocess.Popen[str]:
    command = [word.replace("PORT", str(free_port())) for word in command]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    # The script `drumline` is started as it is; Python's own start is left out elsewhere.
    kind = Warm if command[0] == sys.executable else subprocess.Popen
    return kind(
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


def until_it_trains(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if "| loss" in line:
            return


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, ()) for name in LAUNCHES if name != "drumline"), ("torchrun --standalone", ("--shard", "full"))],
)
def test_every_launch_trains_the_same_curve(
    reference: tuple[Path, list[float]], name: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    where, expected = reference
    process = start([*LAUNCHES[name], *FLAGS, *more, "--run_dir", str(tmp_path / "run")], where)
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
    # A terminal sends Ctrl-C to all processes of its group.
    with start(["setsid", *command], reference[0], TMPDIR=str(scratch)) as process:
        until_it_trains(process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert "saving after this step, then stopping; press Ctrl-C again" in err
    assert process.returncode == EXIT_STOPPED
    assert "everything is saved; to resume" in out
    wait_until_gone(children)
    assert {path.name.split("_")[0] for path in scratch.iterdir()} <= {"torchinductor"}  # a cache
    status = RunFolder(tmp_path / "run").read_status()
    assert status["state"] == "stopped" and RunFolder(tmp_path / "run").checkpoint(status["step"]).exists()


def events_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.events.read_text().splitlines()]


@pytest.mark.needs_shm
def test_a_rank_that_is_killed_is_named_and_with_no_restarts_ends_the_run(
    reference: tuple[Path, list[float]], tmp_path: Path
) -> None:
    with _killed_once(reference[0], tmp_path / "run", "100000", "--max_restarts", "0") as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_FAILED
    lines = [line for line in err.splitlines() if line.startswith(("error:", "  fix:"))]
    assert "SIGKILL" in lines[0] and "rank 1" in lines[0] and "run the same command again" in lines[1]
    status = RunFolder(tmp_path / "run").read_status()
    assert status["state"] == "failed" and "SIGKILL" in status["cause"]
    assert status["first_cause"]["rank"] == 1 and status["first_cause"]["host"] == socket.gethostname()
    last = events_of(RunFolder(tmp_path / "run"))[-1]
    assert last["event"] == "failed" and last["cause"] == status["first_cause"]


@pytest.mark.needs_shm
def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_undisturbed(
    reference: tuple[Path, list[float]], tmp_path: Path
) -> None:
    with _killed_once(reference[0], tmp_path / "run", "60") as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert err.startswith("rank 1 on ") and "was killed by SIGKILL at step " in err
    assert len(losses(tmp_path / "run")) == 60
    folder = RunFolder(tmp_path / "run")
    assert folder.read_status()["state"] == "finished"
    events = [each for each in events_of(folder) if each["event"] not in ("saved", "snapshot")]
    started, restart, again, finished = events
    assert [each["event"] for each in (started, restart, finished)] == ["started", "restart", "finished"]
    assert again["event"] in ("started", "resumed")  # there may have been no snapshot yet
    assert started["world_size"] == again["world_size"] == restart["world_size"] == 2
    assert started["hosts"] == [socket.gethostname()] * 2 and started["versions"]["torch"]
    assert restart["cause"]["rank"] == 1 and restart["cause"]["what"] == "SIGKILL" and restart["what"] in err
    assert again.get("from", "nothing") in ("snapshot", "checkpoint", "nothing")
    assert again["step"] <= restart["cause"]["step"]
    assert [each["time"] for each in events] == sorted(each["time"] for each in events)


@pytest.mark.needs_shm
def test_a_single_rank_is_watched_too_when_it_is_asked_for(reference: tuple[Path, list[float]], tmp_path: Path) -> None:
    with _killed_once(reference[0], tmp_path / "run", "40", "--nproc", "1", rank=0) as process:
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0 and "restarting (1)" in err, err


def _killed_once(where: Path, run: Path, steps: str, *flags: str, rank: int = 1) -> subprocess.Popen[str]:
    """A run on two ranks one of which is killed -9 after its first steps."""
    more = small("--train_data_path", "text", "--global_batch_size", "16", "--total_steps", steps, *flags)
    ranks = () if "--nproc" in flags else ("--nproc", "2")
    process = start([*LAUNCHES["python -m drumline"], *ranks, *more, "--run_dir", str(run)], where)
    until_it_trains(process)
    rank_process(process.pid, rank).kill()
    return process


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8, 1.5])
def test_a_signal_at_any_time_of_the_start_ends_all_promptly_and_in_order(
    reference: tuple[Path, list[float]], tmp_path: Path, after_s: float
) -> None:
    flags = small("--train_data_path", "text", "--global_batch_size", "16", "--total_steps", "100000")
    with start([*LAUNCHES["--nproc"], *flags, "--run_dir", str(tmp_path / "run")], reference[0]) as process:
        wait_until_it_catches(process.pid, signal.SIGTERM)  # until then it is Python's start, not ours
        time.sleep(after_s)  # whatever it is doing then
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (EXIT_STOPPED, EXIT_INTERRUPTED), err
    assert "Traceback" not in err
    wait_until_gone(children)


def test_a_mistake_under_several_ranks_is_told_once(reference: tuple[Path, list[float]], tmp_path: Path) -> None:
    process = start([*LAUNCHES["--nproc"], "--train_data_path", "nowhere.txt"], reference[0])
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert err.splitlines() == [line for line in err.splitlines() if line.startswith(("error:", "  fix:"))]
    assert err.count("error:") == 1 and "nowhere.txt" in err


FUNCTION = """
import sys
from drumline.errors import ConfigError
from drumline.elastic.launch import start_ranks
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
        assert rendezvous_port(str(taken.getsockname()[1])) == 0
    port = free_port()
    assert rendezvous_port(str(port)) == port and rendezvous_port(None) == 0


def test_variables_that_are_not_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="the environment variable WORLD_SIZE is 'two'"):
        find_place({"RANK": "0", "WORLD_SIZE": "two"})


def test_backends_follow_the_device() -> None:
    import torch

    assert check_backend("auto", torch.device("cpu")) == "gloo"
    assert check_backend("auto", torch.device("cuda")) == "nccl"
    assert check_backend("gloo", torch.device("cuda")) == "gloo"


@pytest.mark.parametrize(
    ("rank", "answers", "asked"),
    [
        (0, [], 0),
        (1, [ConnectionRefusedError(), ConnectionRefusedError(), None], 3),
        (2, [socket.gaierror(), None], 1),  # torch's own message is better
    ],
)
def test_a_rank_waits_for_rank_0_to_listen_before_it_leaves_the_waiting_to_torch(
    monkeypatch: pytest.MonkeyPatch, rank: int, answers: list[Exception | None], asked: int
) -> None:
    given = []

    def connect(address: tuple[str, int], timeout: float) -> contextlib.nullcontext[None]:
        given.append(address)
        if (answer := answers[len(given) - 1]) is not None:
            raise answer
        return contextlib.nullcontext()

    monkeypatch.setattr(socket, "create_connection", connect)
    group._wait_for_rank_0(Place(rank, 3, rank, "host-a", 29500))
    assert given == [("host-a", 29500)] * asked
