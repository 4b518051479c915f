"""What is around a command: the pipe that it prints to, the folder that it is given, the shell that it was typed in."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.small import small
from helpers.warm import Warm

from drumline.cli.app import run_command
from drumline.errors import EXIT_USER
from drumline.report.commands import command as command_line

Train = Callable[..., int]


@pytest.mark.parametrize(
    "command", [["sample", "run"], ["evaluate", "run"], ["runs", "."], ["prepare", "text", "--out", "x"]]
)
def test_a_command_whose_output_is_read_no_further_ends_quietly(train: Train, command: list[str]) -> None:
    assert train("--run_dir", "run") == 0
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "drumline", *command]
    with Warm(words, env={**os.environ, "PYTHONUNBUFFERED": ""}, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        _, said = process.communicate(timeout=120)
    assert process.returncode in (0, 1) and b"Error" not in said and b"Traceback" not in said, said


def test_a_broken_connection_is_not_taken_for_output_that_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("drumline.report.list_runs", broken)
    with pytest.raises(BrokenPipeError):
        run_command(["runs"])


def test_a_run_is_not_mixed_with_the_files_of_others(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert train("--run_dir", "text") == EXIT_USER
    problem, fix = capsys.readouterr().err.splitlines()
    assert problem == "error: text is no run, and has 30 other files or folders, such as 0.txt"
    assert fix.endswith("--run_dir text/run") and sorted(tmp_path.rglob("*")) == before
    for name, files in (("empty", ()), ("hidden", (".git",)), ("left", ("train.log", "tokenizer.json"))):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
        assert train("--run_dir", name) == 0
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    flags = small("--train_data_path", str(tmp_path / "text"), "--run_dir", ".")
    assert [run_command(["train", *flags]) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("there", "started_as", "shown"),
    [
        (["bin/drumline"], "elsewhere/drumline", "drumline"),
        ([".venv/bin/drumline"], ".venv/bin/drumline", ".venv/bin/drumline"),
        (["a b/drumline"], "a b/drumline", "'a b/drumline'"),
        (["drumline"], "./drumline", "./drumline"),
        (["v/drumline"], "src/drumline/__main__.py", "v/drumline"),
        ([], "src/drumline/__main__.py", "python -m drumline"),
    ],
)
def test_commands_to_type_are_those_that_this_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[str], started_as: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in map(Path, there):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("sys.argv", [started_as])
    monkeypatch.setattr("sys.executable", str(tmp_path / "v/python"))
    assert command_line("train", "--run_dir", "runs/a b") == f"{shown} train --run_dir 'runs/a b'"
