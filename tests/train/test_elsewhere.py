"""A run's folder is all it takes: used from another folder, moved to another machine, with its text changed or gone."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.files.runs import stored_settings

Train = Callable[..., int]
CHANGE = ["--allow_change", "total_steps", "--total_steps"]


@pytest.fixture
def run(train: Train, tmp_path: Path) -> Path:
    """A finished run, with relative paths in its config."""
    assert train("--train_data_path", "text", "--run_dir", "run", "--total_steps", "3") == 0
    return tmp_path / "run"


def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    capsys.readouterr()
    assert run_command(["evaluate", str(run)]) == 0
    said = capsys.readouterr()
    return said.out.partition("\n")[2], said.err


def test_a_run_is_used_from_another_folder_and_nothing_is_prepared_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = evaluated(run, capsys)[0]
    here = elsewhere(tmp_path / "other", monkeypatch)
    (here / "text").mkdir()  # another text of the same name
    (here / "text/a.txt").write_text("something else " * 90)
    assert evaluated(run, capsys) == (own, "")
    assert run_command(["sample", str(run), "--max_tokens", "3"]) == 0
    assert run_command(["train", "--run_dir", str(run), *CHANGE, "6"]) == 0
    assert "reading text" not in capsys.readouterr().out
    assert [path.name for path in here.iterdir()] == ["text"]
    assert RunFolder(run).read_status()["step"] == 6
    assert RunFolder(run).read_status()["weights_sha256"]


def test_a_run_on_another_machine_finds_its_tokens_by_their_hash(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = evaluated(run, capsys)[0]
    there = tmp_path / "there"
    (there / "runs").mkdir(parents=True)
    run.rename(there / "runs/mine")
    (tmp_path / "data").rename(there / "data")
    for path in (there / "data").iterdir():
        path.rename(there / "data/another-name")
    shutil.rmtree(tmp_path / "text")
    elsewhere(tmp_path / "other", monkeypatch)
    out, error = evaluated(there / "runs/mine", capsys)
    assert out == own and error == f"tokens found in {there}/data/another-name\n"
    assert run_command(["train", "--run_dir", str(there / "runs/mine"), *CHANGE, "6"]) == 0
    shutil.rmtree(there / "data")
    capsys.readouterr()
    assert run_command(["evaluate", str(there / "runs/mine")]) == 1
    error = capsys.readouterr().err
    assert (
        "neither the tokens of" in error and f"({tmp_path}/data/text-" in error and "nor its text (text) are" in error
    )


def test_text_is_tokenized_again_only_if_the_tokens_are_gone_and_that_is_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = evaluated(run, capsys)[0]
    shutil.rmtree(tmp_path / "data")
    out, error = evaluated(run, capsys)
    assert out.splitlines()[-3:] == own.splitlines()[-3:] and "tokenized again" in error
    assert evaluated(run, capsys) == (own, "")


def test_text_that_has_changed_is_called_that_and_the_run_goes_on_with_its_tokens(
    run: Path, tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text/new.txt").write_text("something new " * 90)
    capsys.readouterr()
    more = ("--train_data_path", "text", "--run_dir", "run", "--allow_change", "total_steps")
    assert train(*more, "--total_steps", "6") == 0
    said = capsys.readouterr().out
    assert "text has changed since the run began (30 files of" in said and "31 files of" in said
    assert "text/new.txt is of 20" in said and "the run goes on with its tokens in" in said
    os.remove(tmp_path / "text/new.txt")
    os.utime(tmp_path / "text/3.txt", ns=(1, 1))
    assert train(*more, "--total_steps", "7") == 0
    assert "text has changed since the run began (the same size, but text/" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "text/3.txt").write_text("something new " * 90)
    assert train(*more, "--total_steps", "8") == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert "the text of run, text, has changed since the run began: " in error and "-> 9" in error
    assert "bring back the old text" in fix and json.loads((run / "data.json").read_text())["sha256"] not in error


def test_other_data_than_a_run_began_with_are_refused_in_words(
    run: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.txt").write_text("something else " * 900)
    capsys.readouterr()
    more = ("--run_dir", "run", "--allow_change", "total_steps", "--total_steps", "6")
    assert train("--train_data_path", "other.txt", *more) == 1
    error = capsys.readouterr().err
    assert "the training data are not those that it began with" in error
    assert json.loads((run / "data.json").read_text())["sha256"] not in error


def test_the_config_of_a_run_starts_a_new_run_from_anywhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = elsewhere(tmp_path / "other", monkeypatch)
    assert run_command(["train", "--config", str(run / "config.toml")]) == 0
    said = capsys.readouterr().out
    assert "run    runs/modern-tiny\n" in said and "reading text" not in said
    weights = [RunFolder(folder).read_status()["weights_sha256"] for folder in (run, here / "runs/modern-tiny")]
    assert weights[0] == weights[1]


def test_a_run_of_an_earlier_version_has_no_record_of_its_data_and_goes_on(run: Path, train: Train) -> None:
    (run / "data.json").unlink()
    flags = ("--train_data_path", "text", "--run_dir", "run", "--allow_change", "total_steps", "--total_steps", "6")
    assert run_command(["evaluate", "run"]) == 0
    assert train(*flags) == 0
    assert json.loads((run / "data.json").read_text())["cwd"] == os.getcwd()


def test_only_a_folder_that_a_run_is_in_may_have_its_modules(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    stranger, own = tmp_path / "of-a-stranger", str(tmp_path)
    stranger.mkdir()
    elsewhere(tmp_path / "other", monkeypatch)
    origin = json.loads((run / "data.json").read_text())
    for cwd in (str(stranger), ".", "../of-a-stranger"):
        (run / "data.json").write_text(json.dumps({**origin, "cwd": cwd}))
        stored_settings(RunFolder(run))
        assert not {cwd, str(stranger)} & set(sys.path)
    (run / "data.json").write_text(json.dumps(origin))
    stored_settings(RunFolder(run))
    assert own in sys.path
