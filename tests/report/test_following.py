"""`drumline runs --watch`: the list of runs is kept up to date until none is running any more."""

from pathlib import Path
from typing import Any

import pytest

from drumline.cli.app import run_command
from drumline.files import RunFolder
from drumline.report import follow_runs, list_runs, terminal


def run(path: Path, state: str, step: int) -> RunFolder:
    folder = RunFolder(path)
    folder.path.mkdir(exist_ok=True)
    folder.config.touch()
    folder.write_status(state, step=step, total_steps=9)
    return folder


def test_each_change_is_shown_until_no_run_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", "running", 1)
    run(tmp_path / "b", "finished", 9)
    turns = iter([("running", 1), ("running", 5), ("restarting", 5), ("finished", 9)])

    def later(seconds: float) -> None:
        run(tmp_path / "a", *next(turns))

    monkeypatch.setattr(terminal.time, "sleep", later)
    follow_runs(lambda: list(list_runs(tmp_path)), tmp_path)
    shown = [line.split()[1:3] for line in capsys.readouterr().out.splitlines() if "/a " in line]
    assert shown == [["running", "1/9"], ["running", "5/9"], ["restarting", "5/9"], ["finished", "9/9"]]


def test_a_list_that_is_followed_ends_at_once_if_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def never(seconds: float) -> Any:
        raise AssertionError("there is nothing to wait for")

    monkeypatch.setattr(terminal.time, "sleep", never)
    assert run_command(["runs", "--watch"]) == 0
    assert "no runs in runs" in capsys.readouterr().out
    assert run_command(["runs", "--watch", "--json"]) == 1
    assert "cannot be combined" in capsys.readouterr().err
