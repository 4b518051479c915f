"""The run folder: one process at a time trains in it, and what cannot be written leaves nothing behind."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drumline.errors import ConfigError
from drumline.files import disk
from drumline.files.disk import replace_text
from drumline.files.run_folder import RunFolder

_HOLD = """
import os, sys, time
from pathlib import Path
from drumline.files.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).hold():
    child = os.fork() if sys.argv[2] == "fork" else -1
    if child:
        print("held", child, flush=True)
    time.sleep(600)
"""


@contextmanager
def folder_holder(folder: RunFolder, *, fork: bool = False) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the folder, and the pid of its forked child, if it was to have one."""
    command = [sys.executable, "-c", _HOLD, str(folder.path), "fork" if fork else "alone"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        try:
            yield process, child
        finally:
            process.kill()
            if fork:
                os.kill(child, signal.SIGKILL)


def test_a_second_process_on_a_run_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder_holder(folder) as (process, _):
        with pytest.raises(ConfigError) as refused, folder.hold(wait_s=0.1):
            pass
        assert refused.value.problem == (
            f"{folder.path} is in use: process {process.pid} on {socket.gethostname()} is training there"
        )
        assert "--run_dir" in refused.value.fix


def test_a_process_killed_a_moment_ago_does_not_hinder_the_next_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder_holder(folder) as (process, _):
        late = threading.Timer(0.3, process.kill)
        late.start()
        with folder.hold(wait_s=60):
            assert process.wait() == -signal.SIGKILL
        with folder.hold(wait_s=0):  # and a folder let go is free
            pass


def test_a_forked_child_that_outlives_the_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    with folder_holder(RunFolder(tmp_path), fork=True) as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)  # it is there still
        with RunFolder(tmp_path).hold(wait_s=5):
            pass


def test_a_file_system_without_locks_is_trained_on_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunFolder(tmp_path).hold(), RunFolder(tmp_path).hold():
        pass


def test_a_run_folder_that_cannot_be_made_is_answered_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not writable") as refused, RunFolder(tmp_path / "file/run").hold():
        pass
    assert "--run_dir" in refused.value.fix


def test_a_lock_file_whose_owner_is_not_readable_still_locks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.hold():
        folder.lock.write_text("")  # as when the disk had no room for a name
        with pytest.raises(ConfigError, match="another process"), folder.hold(wait_s=0):
            pass


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status("running", step=1, total_steps=2)
    before = folder.status.read_text()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(disk, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(folder.status, "{}")
    with pytest.raises(OSError, match="No space left"):
        folder.write_status("running", step=2, total_steps=2)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"] and folder.status.read_text() == before
