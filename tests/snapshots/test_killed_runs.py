"""A killed run goes on from memory; a damaged snapshot is passed over, and none stays behind."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.gated import gated
from helpers.small import small

from drumline.checkpoint.in_memory import snapshots_of
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics
from drumline.snapshots.folder import Snapshots

STEPS, FIRST_SAVE = 60, 30
FLAGS = small(
    *("--train_data_path", "text", "--total_steps", str(STEPS), "--save_every", str(FIRST_SAVE)),
    *("--bitwise", "--dropout", "0.1"),
)
SNAPSHOTS = ("--snapshot_every", "1")


@pytest.fixture
def here(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in tmp_path.glob("*/.id"):
        snapshots_of(RunFolder(name.parent)).clear()


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
        snapshots = snapshots_of(folder)
        started.wait_until(lambda: newest_in(snapshots) > FIRST_SAVE)
        started.kill()
    return snapshots, newest_in(snapshots)


def newest_in(snapshots: Snapshots) -> int:
    return max((found.step for found in snapshots.complete()), default=0)


@pytest.mark.needs_shm
def test_a_killed_run_goes_on_from_memory_to_the_same_bits_and_leaves_nothing_there(here: Path) -> None:
    train("calm-log", "calm")
    snapshots, step = train_and_kill("killed-log", "run")
    said = train("again-log", "run", *SNAPSHOTS)
    assert f"resuming from {snapshots.folder} (step {step})" in said
    assert sha256("run") == sha256("calm") and not snapshots.folder.exists()


@pytest.mark.needs_shm
def test_a_killed_run_whose_snapshot_is_damaged_goes_on_from_the_disk(here: Path) -> None:
    snapshots, _ = train_and_kill("killed-log", "run")
    for path in snapshots.slots_of(0, 1):
        os.truncate(path, path.stat().st_size // 2)
    said = train("again-log", "run", *SNAPSHOTS)
    assert said.count("is damaged: it is not as long as it says") in (1, 2)  # one may have been half written
    assert "resuming from run/checkpoints/step-00000030 (step 30)" in said
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
