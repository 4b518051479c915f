"""A command line that cannot be parsed is answered with the one that was probably meant."""

from pathlib import Path

import pytest

from drumline.cli.app import run_command
from drumline.cli.usage import normalized
from drumline.errors import EXIT_USAGE


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run_command(list(words)) == EXIT_USAGE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  fix: ")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["train", "text"], "--train_data_path text, if that was meant"),
        (["train", "my text"], "--train_data_path 'my text', if that was meant"),
        (["sample", "run", "hello you"], "--prompt 'hello you', if that was meant"),
        (["train", "--data", "text"], "use --train_data_path;"),
        (["train", "--learning-rate", "1"], "use --lr;"),
        (["train", "--n_layer", "2"], "use --n_layers;"),
        (["train", "--batch_sise", "2"], "see drumline train --help"),
        (["sample", "run", "--data", "text"], "see drumline sample --help"),
        (["runs", "--nothing"], "see drumline runs --help"),
        (["trian"], "see drumline"),
    ],
    ids=" ".join,
)
def test_what_was_probably_meant_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], fix: str
) -> None:
    answer = said(capsys, *words)
    assert fix in answer and ("--train_data_path" not in answer or words[0] == "train")
    assert sorted(path.name for path in here.iterdir()) == ["text"]


def test_a_misspelled_option_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--batch_size" in said(capsys, "train", "--batch_sise", "2")


def test_a_number_or_a_word_is_asked_for_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'unable to convert "half" into int or one of: none, full, host.' in said(capsys, "train", "--shard", "half")
    assert "into int or one of: auto." in said(capsys, "train", "--snapshot_every", "often")


def test_an_unknown_preset_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --preset modern?" in said(capsys, "train", "--preset", "modrn")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--compile true --bitwise False", "--compile=true --bitwise=false"),
        ("--keep-best false", "--keep-best=false"),
        ("--sample_prompt true --lr 1", "--sample_prompt true --lr 1"),
        ("--bitwise", "--bitwise"),
    ],
)
def test_booleans_may_have_a_value(given: str, read: str) -> None:
    assert " ".join(normalized(given.split())) == read


@pytest.mark.parametrize(
    "words", [["--shard", "1.5"], ["--shard=2.4"], ["--batch-size", "2.5"], ["--snapshot_every", ".5"]], ids=" ".join
)
def test_a_fraction_is_refused_where_it_would_be_rounded(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    name, value = "=".join(words).removeprefix("--").replace("-", "_").split("=")
    assert f"--{name} {value} would be rounded" in said(capsys, "train", "--dry_run", *words)
    (here / "run.toml").write_text(f"{name} = 0{value}\n" if value[0] == "." else f"{name} = {value}\n")
    answer = said(capsys, "train", "--dry_run", "--config", "run.toml")
    assert f"run.toml: {name} " in answer and f"{value} would be rounded" in answer


def test_a_whole_number_may_be_written_with_a_point(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("train --dry_run --train_data_path text --batch_size 2.0 --lr 0.5".split()) == 0
    out = capsys.readouterr().out
    assert "batch_size = 2\n" in out and "lr = 0.5\n" in out
