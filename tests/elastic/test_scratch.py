"""Where launchers keep their heartbeats: no launcher touches another's, no other user's, and none needs /dev/shm."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers.launchers import rank_process
from helpers.small import small
from helpers.warm import run_warm

from drumline.elastic import scratch
from drumline.elastic.diagnosis import read_end, record_cause
from drumline.elastic.scratch import Scratch, newest_attempt
from drumline.elastic.watch import read_pulse
from drumline.files.run_folder import RunFolder
from drumline.parallel import ATTEMPT, SupervisedPulse
from drumline.report.records import read_metrics

TIMEOUT_S = 120
STEPS = 300
FLAGS = small("--train_data_path", "text", "--global_batch_size", "16", "--total_steps", str(STEPS), "--nproc", "2")
OWN_PROCESSES = "unshare --pid --fork --mount-proc --kill-child sh -c"
LATE = "n=0; while [ $n -lt 99 ]; do (:); n=$((n + 1)); done;"
"""Lets the next process have a number that no other process has in a namespace of its own."""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Folders in the place of /dev/shm and of the one for temporary files."""
    memory, temporary = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(scratch, "_MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return memory, temporary


def test_a_launcher_removes_only_what_nobody_holds(places: tuple[Path, Path]) -> None:
    living, other = Scratch(), Scratch()
    folder = living.attempt(1, [0]).folder
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    another = other.attempt(1, [0]).folder
    assert folder.exists()
    for lock in living._locks.values():
        lock.close()  # as if its process were gone
    third = Scratch()
    third.attempt(1, [0])
    assert not folder.parent.exists() and another.exists()
    other.remove()
    third.remove()
    assert not list(places[0].iterdir())


def test_what_another_user_has_made_and_links_are_neither_used_nor_removed(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, stranger = tmp_path / "elsewhere", places[0] / "drumline-1-stranger"
    for folder in (elsewhere, stranger):
        (folder / "attempt-9").mkdir(parents=True)
        (folder / "lock").touch()
    (places[0] / "drumline-1-link").symlink_to(elsewhere)
    (places[0] / "drumline-1-file").touch()
    monkeypatch.setattr(os, "getuid", lambda: elsewhere.stat().st_uid + 1)
    assert newest_attempt(1) is None
    scratch._remove_abandoned(places[0])
    assert stranger.exists()
    monkeypatch.undo()
    stranger.rename(tmp_path / "gone")
    monkeypatch.setattr(scratch, "_MEMORY", places[0])
    assert newest_attempt(1) is None
    scratch._remove_abandoned(places[0])
    assert (elsewhere / "lock").exists() and (places[0] / "drumline-1-link").is_symlink()


@pytest.mark.needs("disks")
def test_what_a_rank_fails_with_is_recorded_though_shared_memory_is_full_by_then(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scratch, "_MEMORY", small_disk)
    monkeypatch.setattr(scratch, "_RANK_BYTES", 1)
    own = Scratch()
    with contextlib.ExitStack() as ending:
        ending.callback(own.remove)  # or its disk could not be taken away
        attempt = own.attempt(1, [0, 1])
        assert attempt.folder.is_relative_to(small_disk)
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "filler").write_bytes(bytes(1 << 20))
        monkeypatch.setenv(ATTEMPT, str(attempt.folder))
        monkeypatch.setenv("RANK", "1")
        record_cause(RuntimeError("Connection reset by peer"))
        assert capsys.readouterr().err == ""
        end = read_end(attempt, 1, pid=1, code=1)
        assert end.is_symptom and end.said is not None and end.said["rank"] == 1
        assert read_end(attempt, 0, pid=1, code=-9).said is None


def test_heartbeats_lie_where_there_is_room_and_a_rank_without_room_goes_on_unwatched(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, full = scratch.reserve_record, [places[0]]

    def reserving(path: Path, *size: int) -> None:
        if any(path.is_relative_to(each) for each in full):
            raise OSError(28, "No space left on device")
        reserve(path, *size)

    monkeypatch.setattr(scratch, "reserve_record", reserving)
    own = Scratch()
    assert own.attempt(1, [0, 1]).folder.is_relative_to(places[1])
    full.clear()
    first = own.attempt(2, [0, 1])
    assert first.folder.is_relative_to(places[0]) and first.pulse(1).stat().st_blocks > 0
    assert not list(places[1].glob("*/attempt-*"))
    full += places
    nowhere = own.attempt(3, [0, 1])
    assert nowhere.number == 3 and not nowhere.folder.exists() and not first.folder.exists()
    pulse = SupervisedPulse(nowhere.folder)
    pulse.start(0)
    pulse.promise_an_ending()
    pulse.tell_run_dir(places[0])
    pulse.at("compute", 3)
    pulse.stop()
    assert read_pulse(nowhere, 0) is None and pulse.started_again
    own.remove()


def start(command: str, where: Path, log: Path) -> subprocess.Popen[bytes]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    with log.open("w") as file:
        return subprocess.Popen(
            ["sh", "-c", f"exec {command}"], cwd=where, env={**clean, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=file
        )


def train(run: Path) -> str:
    return shlex.join([sys.executable, "-m", "drumline", "train", *FLAGS, "--run_dir", str(run)])


def wait_until(process: subprocess.Popen[bytes], condition: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def steps(run: Path) -> int:
    return len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0


def weights(run: Path) -> str:
    status = RunFolder(run).read_status()
    assert status["state"] == "finished" and status["step"] == STEPS
    return str(status["weights_sha256"])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with text, and the weights of a run on it that nothing happens to."""
    where = tmp_path_factory.mktemp("calm")
    (where / "text").mkdir()
    for number in range(30):
        (where / "text" / f"{number}.txt").write_text(f"Document {number}. " + "All work and no play. " * 12)
    run_warm([*shlex.split(train(where / "run"))], cwd=where, timeout=TIMEOUT_S)
    return where, weights(where / "run")


@pytest.mark.needs("processes")
@pytest.mark.needs_shm
def test_launchers_that_share_dev_shm_but_not_their_processes_leave_each_other_alone(
    tmp_path: Path, calm: tuple[Path, str]
) -> None:
    log, other_log = tmp_path / "first.log", tmp_path / "second.log"
    words = shlex.quote(f"{LATE} {train(tmp_path / 'first')}; exit $?")
    first = start(f"{OWN_PROCESSES} {words}", calm[0], log)
    try:
        wait_until(first, lambda: steps(tmp_path / "first") > 2, log)
        launcher = psutil.Process(first.pid).children()[0].children()[0]
        processes = [launcher, *launcher.children(recursive=True)]
        for process in processes:
            process.suspend()
        second = start(f"{OWN_PROCESSES} {shlex.quote(train(tmp_path / 'second'))}", calm[0], other_log)
        assert second.wait(TIMEOUT_S) == 0, other_log.read_text()
        rank_process(launcher.pid, 1).kill()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        assert first.wait(TIMEOUT_S) == 0, log.read_text()
    finally:
        first.kill()
    assert "was killed by SIGKILL" in log.read_text() and "restarting (1)" in log.read_text()
    assert weights(tmp_path / "first") == weights(tmp_path / "second") == calm[1]


@pytest.mark.needs("disks")
@pytest.mark.parametrize(
    ("options", "filled"), [("size=64k", False), ("nr_inodes=2", False), ("size=2m,nr_inodes=40", True)]
)
def test_a_dev_shm_without_room_costs_no_rank_its_life(
    tmp_path: Path, calm: tuple[Path, str], options: str, filled: bool
) -> None:
    """filled: it is full when a rank dies, and not before"""
    log, run = tmp_path / "log", tmp_path / "run"
    words = f"mount -t tmpfs -o {options} none /dev/shm && exec {train(run)}"
    launcher = start(f"unshare --mount sh -c {shlex.quote(words)}", calm[0], log)
    try:
        wait_until(launcher, lambda: steps(run) > 2, log)
        if filled:
            _fill(Path(f"/proc/{launcher.pid}/root/dev/shm"))
        rank_process(launcher.pid, 1).kill()
        assert launcher.wait(TIMEOUT_S) == 0, log.read_text()
    finally:
        launcher.kill()
    said = log.read_text()
    assert "was killed by SIGKILL" in said and "SIGBUS" not in said
    assert weights(run) == calm[1]


def _fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "other").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert shutil.disk_usage(folder).free == 0
