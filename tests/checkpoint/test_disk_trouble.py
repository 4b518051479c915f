"""Whole runs on a disk that fills up, becomes read-only or goes away: they go on, say so, and lose nothing."""

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.gated import Gated, gated
from helpers.small import small

from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

STEPS = 30
FLAGS = small("--train_data_path", "text", "--total_steps", str(STEPS), "--save_every", "5", "--keep_checkpoints", "9")
BEGIN, END = 12, 22
"""Steps between which the disk is in trouble: the checkpoints of 15 and 20 cannot be saved."""
Trouble = tuple[Callable[[int], object], Callable[[int], object]]
"""What makes the trouble and what ends it, given the process."""


@pytest.fixture
def disk(here: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = here / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "drumline-test", folder], check=True)
    yield folder
    while folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=True)


def train(scratch: str, run: Path, trouble: Trouble | None = None) -> Gated:
    """A run to its end, with trouble on the way."""
    flags = [*FLAGS, "--run_dir", str(run)]
    folder = RunFolder(run)
    with gated(Path(scratch), flags, gates=(BEGIN, END) if trouble else ()) as started:
        if trouble:
            started.wait_at(BEGIN)
            started.wait_until(folder.checkpoint(10).exists)
            trouble[0](started.pid)
            started.go(BEGIN)
            started.wait_at(END)
            trouble[1](started.pid)
            started.go(END)
        assert started.end() == 0, started.said
    return started


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def check_nothing_is_lost(run: Path, calm: Path) -> None:
    folder = RunFolder(run)
    status = folder.read_status()
    assert status["state"] == "finished" and status["weights_sha256"] == RunFolder(calm).read_status()["weights_sha256"]
    assert losses(run) == losses(calm) and len(losses(run)) == STEPS
    saved = [open_checkpoint(path).step for path in checkpoint_paths(folder.checkpoints)]
    assert {5, 10, 25, 30} <= set(saved)
    assert not list(folder.checkpoints.glob(".*"))
    events = [record["event"] for record in read_metrics(folder.events)]
    assert "save failed" in events and events[-2:] == ["saved", "finished"]


def full(disk: Path) -> Trouble:
    ballast = disk / "ballast"

    def fill(pid: int) -> None:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert shutil.disk_usage(disk).free == 0

    return fill, lambda pid: ballast.unlink()


def read_only(disk: Path) -> Trouble:
    def forbid(pid: int) -> None:
        # A disk with a file open for writing cannot be asked to become read-only; it becomes so by itself when it
        # fails. For whoever opens a path, a read-only view laid over it is the same.
        subprocess.run(["mount", "--bind", disk, disk], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)

    return forbid, lambda pid: subprocess.run(["umount", disk], check=True)


def gone(disk: Path) -> Trouble:
    behind = disk.with_name("behind")

    def unplug(pid: int) -> None:
        behind.mkdir()
        subprocess.run(["mount", "--bind", disk, behind], check=True)
        subprocess.run(["umount", "-l", disk], check=True)

    def plug_in(pid: int) -> None:
        assert list(disk.iterdir()) == []  # nothing was written where the disk had been
        subprocess.run(["mount", "--bind", behind, disk], check=True)
        subprocess.run(["umount", "-l", behind], check=True)

    return unplug, plug_in


@pytest.mark.needs("disks")
@pytest.mark.parametrize(
    ("trouble", "why"),
    [(full, "No space left on device"), (read_only, "Read-only file system"), (gone, "No such file or directory")],
)
def test_a_disk_in_trouble_for_a_while_costs_a_run_nothing(
    disk: Path, trouble: Callable[[Path], Trouble], why: str
) -> None:
    run = disk / "run"
    started = train("troubled", run, trouble(disk))
    train("calm-log", Path("calm"))
    (said, *_) = [line for line in started.said.splitlines() if line.startswith("WARNING")]
    assert f"the checkpoint of step 15 could not be saved to {run}/checkpoints: {why}" in said
    assert "kB needed, " in said and "free)" in said
    kept = "none" if trouble is gone else "10"
    assert f"The one of step {kept} is kept, training continues" in said
    check_nothing_is_lost(run, Path("calm"))


def test_files_that_may_not_grow_for_a_while_cost_a_run_nothing(here: Path) -> None:
    def limit(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def lift(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    run = here / "run"
    train("troubled", run, (limit, lift))
    train("calm-log", Path("calm"))
    check_nothing_is_lost(run, Path("calm"))
    # The console was such a file too; what it missed is in the log, late.
    assert "the checkpoint of step 15 could not be saved" in (run / "train.log").read_text()


@pytest.mark.needs("disks")
def test_a_disk_too_small_for_the_last_checkpoint_is_waited_for(disk: Path) -> None:
    ballast = disk / "ballast"
    with gated(Path("log"), [*FLAGS, "--run_dir", str(disk / "run")], gates=[26]) as started:
        started.wait_at(26)
        fill, _ = full(disk)
        fill(started.pid)
        started.go(26)
        started.wait_until(lambda: started.said.count("the checkpoint of step 30 could not be saved") > 1)
        ballast.unlink()
        assert started.end() == 0, started.said
    assert open_checkpoint(RunFolder(disk / "run").checkpoint(30)).step == 30
    shutil.rmtree(disk / "run")
    assert os.listdir(disk) == []
