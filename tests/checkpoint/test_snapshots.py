"""Copies in memory: a killed run goes on from them, a damaged one is passed over, and none stays behind."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from helpers.gated import gated
from helpers.saved import ALONE, saver_of, state, trained
from helpers.small import small

from drumline.checkpoint import resuming
from drumline.checkpoint.checkpoints import checkpoint_paths
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.snapshots import Snapshots
from drumline.checkpoint.state import tensors_of
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

STEPS, FIRST_SAVE = 60, 30
FLAGS = small(
    *("--train_data_path", "text", "--total_steps", str(STEPS), "--save_every", str(FIRST_SAVE)),
    *("--bitwise", "--dropout", "0.1"),
)
SNAPSHOTS = ("--snapshot_every", "1")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(resuming, "MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def keep(snapshots: Snapshots, step: int) -> None:
    snapshots.save(tensors_of(*trained()), state(step))


def test_only_the_newest_snapshot_is_held_and_leftovers_go(memory: Path, tmp_path: Path) -> None:
    snapshots = Snapshots.of(RunFolder(tmp_path), "run")
    keep(snapshots, 1)
    for leftover in (".step-00000002.77", "step-00000001.superseded", "step-00000000.damaged"):
        (snapshots.folder / leftover).mkdir()
    keep(snapshots, 3)
    assert sorted(path.name for path in snapshots.folder.iterdir()) == [".lock", "run", "step-00000003"]
    newest = snapshots.newest(warn=print)
    assert newest is not None and newest.step == 3
    assert snapshots.folder.stat().st_mode & 0o777 == 0o700


def test_a_damaged_snapshot_is_passed_over(memory: Path, tmp_path: Path) -> None:
    snapshots, said = Snapshots.of(RunFolder(tmp_path), "run"), list[str]()
    keep(snapshots, 1)
    (file,) = (snapshots.folder / "step-00000001").glob("model*")
    file.write_bytes(b"\x80\x04" + file.read_bytes()[2:])
    assert snapshots.newest(warn=said.append) is None and "is damaged" in said[0]


def test_the_memory_is_given_back_and_other_runs_keep_theirs(memory: Path, tmp_path: Path) -> None:
    one, other = (Snapshots.of(RunFolder(tmp_path), name) for name in ("one", "other"))
    for snapshots in (one, other):
        keep(snapshots, 1)
    one.clear()
    assert not one.folder.exists() and other.newest(warn=print) is not None
    other.clear()
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("scarce", ["shm", "memory"])
def test_snapshots_are_off_while_there_is_no_room_and_that_is_said_once(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    events: list[dict[str, Any]] = []
    free_bytes = {"shm": 1 << 40, "memory": 1 << 40}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes["shm"]))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_bytes["memory"]))
    snapshots = Snapshots.of(RunFolder(tmp_path), "run")
    saver = saver_of(RunFolder(tmp_path / "run"), tell=lambda message, event: events.append(event), snapshots=snapshots)
    saver.poll()
    assert saver._prepared is not None
    saver._prepared.result()
    for step, room_bytes, kept_step in ((1, 1 << 40, 1), (2, -5000, 1), (3, -5000, 1), (4, 1 << 40, 4)):
        free_bytes[scarce] = room_bytes
        saver.snapshot(state(step))
        saver.wait()
        assert [step_of(path) for path in checkpoint_paths(snapshots.folder)] == [kept_step]
    saver.forget_snapshots()
    saver.close()
    assert [event["event"] for event in events] == ["snapshots off"] and f"of memory in {memory}" in events[0]["why"]
    assert list(memory.iterdir()) == []


@pytest.fixture
def here(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in tmp_path.glob("*/.id"):
        Snapshots.of(RunFolder(name.parent)).clear()


def sha256(run: str) -> str:
    status = RunFolder(Path(run)).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def train(scratch: str, run: str, *flags: str) -> str:
    with gated(Path(scratch), [*FLAGS, "--run_dir", run, *flags]) as started:
        assert started.end() == 0, started.said
    return started.said


def train_and_kill(scratch: str, run: str) -> tuple[Snapshots, int]:
    """kill -9 when there is a snapshot that is newer than the first checkpoint; its step."""
    folder = RunFolder(Path(run))
    before, after = FIRST_SAVE + 1, FIRST_SAVE + 2
    with gated(Path(scratch), [*FLAGS, "--run_dir", run, *SNAPSHOTS], gates=(before, after)) as started:
        started.wait_at(before)
        started.wait_until(lambda: "saved" in [record["event"] for record in read_metrics(folder.events)])
        started.go(before)
        started.wait_at(after)
        snapshots = Snapshots.of(folder)
        started.wait_until(lambda: newest_in(snapshots) > FIRST_SAVE)
        started.kill()
    return snapshots, newest_in(snapshots)


def newest_in(snapshots: Snapshots) -> int:
    return max((step_of(path) for path in checkpoint_paths(snapshots.folder)), default=0)


@pytest.mark.needs_shm
def test_a_killed_run_goes_on_from_memory_to_the_same_bits_and_leaves_nothing_there(here: Path) -> None:
    train("calm-log", "calm")
    snapshots, step = train_and_kill("killed-log", "run")
    said = train("again-log", "run", *SNAPSHOTS)
    assert f"resuming from {snapshots.folder}/step-{step:08d} (step {step})" in said
    assert sha256("run") == sha256("calm") and not snapshots.folder.exists()


@pytest.mark.needs_shm
def test_a_killed_run_whose_snapshot_is_damaged_goes_on_from_the_disk(here: Path) -> None:
    snapshots, step = train_and_kill("killed-log", "run")
    (file,) = (snapshots.folder / RunFolder.checkpoint_name(step)).glob("optimizer*")
    file.write_bytes(file.read_bytes()[:-1])
    said = train("again-log", "run", *SNAPSHOTS)
    assert f"step-{step:08d} is damaged" in said and "resuming from run/checkpoints/step-00000030 (step 30)" in said
    train("calm-log", "calm")
    assert sha256("run") == sha256("calm") and not snapshots.folder.exists()


@pytest.mark.needs_shm
def test_a_new_run_in_a_folder_of_the_same_path_never_meets_the_old_ones_memory(here: Path) -> None:
    snapshots, _ = train_and_kill("killed-log", "run")
    shutil.rmtree("run")
    assert "resuming" not in train("again-log", "run", *SNAPSHOTS)
    snapshots.clear()


@pytest.mark.needs_shm
def test_a_run_told_where_to_go_on_forgets_its_memory(here: Path) -> None:
    snapshots, _ = train_and_kill("killed-log", "run")
    said = train("again-log", "run", *SNAPSHOTS, "--resume_from", str(FIRST_SAVE))
    assert "resuming from run/checkpoints/step-00000030 (step 30)" in said and not snapshots.folder.exists()


def test_two_launchers_of_a_run_on_one_machine_keep_one_snapshot(memory: Path, tmp_path: Path) -> None:
    one, other = (Snapshots.of(RunFolder(tmp_path), "run") for _ in range(2))
    keep(one, 1)
    keep(other, 2)  # does nothing: the first one does it
    assert [step_of(path) for path in checkpoint_paths(one.folder)] == [1]
    assert one._lock is not None
    one._lock.close()  # as when its process dies
    keep(other, 2)
    assert [step_of(path) for path in checkpoint_paths(one.folder)] == [2]


def test_the_memory_of_a_run_that_was_deleted_is_given_back_by_the_next_one(memory: Path, tmp_path: Path) -> None:
    gone, living = (RunFolder(tmp_path / name) for name in ("gone", "living"))
    for run in (gone, living):
        run.path.mkdir()
        snapshots = Snapshots.of(run)
        keep(snapshots, 1)
        if run is gone:
            shutil.rmtree(run.path)
            orphaned = snapshots
    Snapshots.of(living).forget_others()
    assert orphaned.folder.exists()  # its process still lives
    assert orphaned._lock is not None
    orphaned._lock.close()
    Snapshots.of(living).forget_others()
    assert not orphaned.folder.exists() and Snapshots.of(living).newest(warn=print) is not None


def test_a_run_that_takes_no_snapshots_and_has_left_none_does_without_them(memory: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    assert resuming.find_snapshots(run, ALONE, takes=False) is None
    assert not resuming.has_begun("auto", run, ALONE, None) and resuming.has_begun("4", run, ALONE, None)
    snapshots = resuming.find_snapshots(run, ALONE, takes=True)
    assert snapshots is not None
    keep(snapshots, 1)
    left = resuming.find_snapshots(RunFolder(run.path), ALONE, takes=False)
    assert left is not None and left.folder == snapshots.folder and resuming.has_begun("auto", run, ALONE, left)


def test_room_can_be_measured_while_another_launcher_replaces_its_snapshots(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "memory", RunFolder(tmp_path / "run"))
    done = threading.Event()

    def replace_them() -> None:
        while not done.is_set():
            aside = snapshots.folder / ".step-1"
            aside.mkdir(parents=True)
            (aside / "weights").write_bytes(b"1")
            shutil.rmtree(aside)

    other = threading.Thread(target=replace_them)
    other.start()
    try:
        assert [snapshots.no_room(1) for _ in range(500)] == [None] * 500
    finally:
        done.set()
        other.join()
