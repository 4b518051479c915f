"""A run folder that is deleted while its run trains: the run says so, saves what it has, and ends."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.gated import gated
from helpers.launchers import rank_process
from helpers.small import small
from helpers.warm import piped, run_warm

from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.elastic.deleted import FolderOfRun
from drumline.errors import EXIT_USER, ConfigError
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

TIMEOUT_S = 120
FLAGS = small("--train_data_path", "text", "--run_dir", "run", "--total_steps", "30", "--save_every", "10")


def newest(run: Path) -> int:
    return open_checkpoint(checkpoint_paths(RunFolder(run).checkpoints)[-1]).step


def delete() -> None:
    """As by rm -rf; the run may write there at this time."""
    while Path("run").exists():
        shutil.rmtree("run", ignore_errors=True)


def until(process: subprocess.Popen[str], text: str) -> str:
    """What the run has said up to the line that has this."""
    assert process.stdout is not None
    said = ""
    while text not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    return said


def goes_on(*flags: str) -> None:
    """The same command again finishes the run as if nothing had happened."""
    again = run_warm([sys.executable, "-m", "drumline", "train", *FLAGS, *flags], timeout=TIMEOUT_S)
    assert again.returncode == 0 and "resuming from" in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize("at", [1, 15, 29])
def test_a_deleted_folder_ends_the_run_at_the_next_save_which_is_where_the_folder_was(here: Path, at: int) -> None:
    with gated(Path("log"), FLAGS, gates=[at]) as started:
        started.wait_at(at)
        delete()
        started.go(at)
        assert started.end() == EXIT_USER, started.said
    step = newest(here / "run")
    assert at < step <= 30
    error = started.said[started.said.index("error: ") :].splitlines()
    assert error[0] == (
        f"error: the run folder run was deleted while the run was training; step {step} is saved in run"
    )
    assert error[1] == "  fix: run the same command again with --run_dir run to resume"
    assert RunFolder(here / "run").read_status()["state"] == "failed"
    goes_on()


def test_a_folder_deleted_after_the_last_save_is_not_called_finished(here: Path) -> None:
    driver = """
import os, shutil
from drumline.checkpoint.saver import Saver
finish = Saver.finish
def deleted_first(self, state, **more):
    self.save(state)
    self.wait()
    while os.path.exists("run/.id"):
        shutil.rmtree("run", ignore_errors=True)  # others write there at this time
    finish(self, state, **more)
Saver.finish = deleted_first
from drumline.cli.app import main
main()
"""
    ended = run_warm([sys.executable, "-c", driver, "train", *FLAGS], timeout=TIMEOUT_S)
    assert ended.returncode == EXIT_USER and "step 30 is saved in run" in ended.stderr, ended.stdout + ended.stderr
    assert newest(here / "run") == 30


def test_a_run_that_another_one_has_replaced_does_not_write_into_its_folder(here: Path) -> None:
    with gated(Path("log"), FLAGS, gates=[15]) as started:
        started.wait_at(15)
        delete()
        other = run_warm([sys.executable, "-m", "drumline", "train", *FLAGS], timeout=TIMEOUT_S)
        assert other.returncode == 0, other.stderr
        before = {path: path.stat().st_mtime_ns for path in Path("run/checkpoints").rglob("*")}
        started.go(15)
        assert started.end() == EXIT_USER, started.said
    assert "is saved in run-2" in started.said
    assert {path: path.stat().st_mtime_ns for path in Path("run/checkpoints").rglob("*")} == before
    assert RunFolder(here / "run").read_status()["state"] == "finished"
    assert newest(here / "run-2") >= 16


def test_only_the_lock_deleted_is_no_reason_to_stop(here: Path) -> None:
    with gated(Path("log"), FLAGS, gates=[15]) as started:
        started.wait_at(15)
        os.unlink("run/.lock")
        started.go(15)
        assert started.end() == 0, started.said


@pytest.mark.parametrize("step", [1, 100, 360])
def test_two_ranks_whose_folder_is_deleted_end_with_one_error(here: Path, step: int) -> None:
    flags = [*FLAGS, "--total_steps", "400", "--save_every", "50", "--nproc", "2"]
    with piped(["-m", "drumline", "train", *flags]) as process:
        family: list[psutil.Process] = []
        try:
            said = until(process, f"step {step:>4}/400")
            family = psutil.Process(process.pid).children(recursive=True)
            subprocess.run(["rm", "-rf", "run"], check=False, capture_output=True)  # others write there at this time
            said += process.communicate(timeout=TIMEOUT_S)[0]
        finally:
            process.kill()
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    assert process.returncode == EXIT_USER, said
    assert said.count("error: ") == 1 and "the run folder run was deleted while the run was training" in said
    assert "restarting" not in said and newest(here / "run") > step
    if step < 360:  # else the last record may have been written before
        assert [record["step"] for record in read_metrics(here / "run/metrics.jsonl")] != []


def test_a_folder_deleted_before_a_rank_is_killed_costs_the_steps_since_the_snapshot(here: Path) -> None:
    flags = [*FLAGS, "--total_steps", "400", "--save_every", "5000", "--snapshot_every", "10", "--nproc", "2"]
    with piped(["-m", "drumline", "train", *flags]) as process:
        try:
            said = until(process, "step  150/400")
            delete()
            os.kill(rank_process(process.pid, 1).pid, signal.SIGKILL)
            said += process.communicate(timeout=TIMEOUT_S)[0]
        finally:
            process.kill()
    assert process.returncode == 0, said
    told = "was deleted while the run was training; it is made again: the run goes on from a snapshot"
    assert told in said
    (resumed,) = re.findall(r"resuming from /dev/shm/\S+ \(step (\d+)\)", said)
    steps = [record["step"] for record in read_metrics(here / "run/metrics.jsonl")]
    assert int(resumed) >= 140 and min(steps) > int(resumed) and newest(here / "run") == 400


def test_a_folder_that_another_run_took_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    of_run, folder = FolderOfRun(), RunFolder(tmp_path / "run")
    assert not of_run.put_back()  # no rank came as far as choosing a folder
    folder.path.mkdir()
    own = folder.run_id()
    of_run.look(folder.path)
    assert not of_run.put_back()
    shutil.rmtree(folder.path)
    assert of_run.put_back() and folder.stored_id() == own
    folder.identity.unlink()
    other = RunFolder(folder.path).run_id()
    of_run.look(folder.path)
    with pytest.raises(ConfigError, match="was deleted while the run was training, and another run is there"):
        of_run.put_back()
    assert folder.stored_id() == other
