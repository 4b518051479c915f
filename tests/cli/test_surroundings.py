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
    (tmp_path / "one").mkdir()
    (tmp_path / "one/thesis.tex").touch()
    assert train("--run_dir", "one") == EXIT_USER
    assert "error: one is no run, and has another file or folder, thesis.tex\n" in capsys.readouterr().err
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


def test_control_characters_of_a_sample_are_shown_not_obeyed(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("--run_dir", "run", "--sample_prompt", "a\x1b[2J\tb\0") == 0
    assert "  | a\\x1b[2J\tb\\x00" in capsys.readouterr().out
    assert b"\x1b" not in Path("run/train.log").read_bytes()
    assert run_command(["sample", "run", "--prompt", "a\x0e\nb", "--max_tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("a\\x0e\nb")


def test_a_run_without_its_tokenizer_is_told_which_file_is_missing(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "run") == 0
    Path("run/tokenizer.json").unlink()
    capsys.readouterr()
    assert run_command(["sample", "run"]) == EXIT_USER
    assert "the run run has no tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("launch slurm", 2, "see drumline launch slurm --help"),
        ("launch k8s", 2, "see drumline launch k8s --help"),
        ("runs nosuch", 1, "error: nosuch does not exist"),
        ("runs file", 1, "error: file is not a folder"),
        ("launch --hostfile nosuch -- train", 1, "cannot read the hosts in nosuch: No such file or directory"),
        ("prepare tokens --out other", 1, "error: tokens is tokenized already"),
    ],
)
def test_what_is_missing_or_another_thing_is_named(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, code: int, said: str
) -> None:
    (here / "file").touch()
    if "tokens" in command:
        assert run_command(["prepare", "text", "--out", "tokens", "--vocab_size", "1000000"]) == 0
        assert "the text is too small for a vocabulary of 1,000,000" in capsys.readouterr().out
    assert run_command(command.split()) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and said in "\n".join(lines)


def test_a_run_whose_status_cannot_be_read_is_not_called_new(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run_dir", "runs/one") == 0
    Path("runs/one/status.json").write_text("{")
    capsys.readouterr()
    assert run_command(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["runs/one", "unknown", "6/?"]
