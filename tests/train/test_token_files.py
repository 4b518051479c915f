"""Token files of other trainers: trained on as they are, with a vocabulary that their ids fit into."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.ranks import _command, run_ranks
from helpers.small import small

from drumline.cli.app import run_command
from drumline.files import stored_config
from drumline.files.run_folder import RunFolder
from drumline.files.verified import PART_BYTES, sampled

Train = Callable[..., int]


def sha256(run: Path) -> str:
    status = RunFolder(run).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def test_peers_token_files_train_as_they_are(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = (np.arange(4000) % 290).astype("<u2")
    tokens.tofile("train.bin")
    tokens[:500].tofile("val.bin")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    Path("llmc.bin").write_bytes(header.tobytes() + tokens.tobytes())
    assert train("--train_data_path", "train.bin", "--valid_data_path", "val.bin", "--run_dir", "nano") == 0
    assert "validation loss" in capsys.readouterr().out
    assert train("--train_data_path", "llmc.bin", "--run_dir", "llmc") == 0
    assert sha256(Path("nano")) == sha256(Path("llmc"))
    assert train("--train_data_path", "train.bin", "--vocab_size", "100") == 1
    assert "vocab" in capsys.readouterr().err
    tokens.astype("<u4").tofile("wide.bin")
    wide = ("--train_data_path", "wide.bin", "--run_dir", "wide")
    assert train(*wide) == 1
    assert "add --data_dtype uint32" in capsys.readouterr().err
    assert train(*wide, "--data_dtype", "uint32", "--valid_data_path", "wide.bin") == 0
    assert sha256(Path("wide")) == sha256(Path("nano"))
    capsys.readouterr()
    assert run_command(["evaluate", "wide"]) == 0
    own = capsys.readouterr().out
    assert run_command(["evaluate", "wide", "--data", "wide.bin"]) == 0
    assert capsys.readouterr().out == own


@pytest.mark.parametrize(
    ("largest", "line"),
    [
        (50_256, "vocabulary 50,304: ids up to 50,256; --vocab_size sets it\n"),
        (60_000, "vocabulary 60,032: ids up to 60,000; --vocab_size sets it\n"),
        (2_047, "vocabulary 2,048\n"),
    ],
)
def test_a_token_file_that_says_no_vocabulary_gets_one_that_its_ids_fit_into(
    here: Path, capsys: pytest.CaptureFixture[str], largest: int, line: str
) -> None:
    tokens = (np.arange(4000) * 7 % 2_000).astype("<u2")
    tokens.tofile("train.bin")
    tokens[100] = largest
    tokens[:500].tofile("val.bin")
    words = small("--train_data_path", "train.bin", "--valid_data_path", "val.bin", "--total_steps", "2")
    at = words.index("--vocab_size")
    del words[at : at + 2]
    assert run_command(["train", "--dry_run", *words]) == 0
    size = int(re.findall(r"[\d,]+", line)[0].replace(",", ""))
    assert f"vocab_size = {size}\n" in capsys.readouterr().out
    for _ in range(2):  # a new run, and the same one resumed
        assert run_command(["train", "--run_dir", "run", *words]) == 0
        assert line in capsys.readouterr().out
    stored = stored_config(RunFolder(Path("run")))
    assert stored is not None and stored.data.vocab_size == size


@pytest.mark.parametrize(("stored", "said"), [("<u2", "uint32"), ("<i4", "int32")])
def test_ids_that_no_vocabulary_has_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], stored: str, said: str
) -> None:
    tokens = np.full(4000, 5000, stored) if stored == "<u2" else -np.ones(4000, stored)
    tokens.astype(stored).tofile("train.bin")
    flags = ["--preset", "tiny", "--train_data_path", "train.bin", "--data_dtype", said, "--device", "cpu"]
    assert run_command(["train", *flags]) == 1
    assert "is outside the vocabulary of 2048" in capsys.readouterr().err


FILES = ("--train_data_path", "train.bin", "--valid_data_path", "val.bin", "--run_dir", "run")
MORE = (*FILES, "--allow_change", "total_steps")


def tokens_of_a_run(train: Train) -> None:
    tokens = (np.arange(4000) % 290).astype("<u2")
    tokens.tofile("train.bin")
    tokens[:500].tofile("val.bin")
    assert train(*FILES, "--total_steps", "2") == 0


def reverse(path: str) -> None:
    """Other tokens, of the same size and time."""
    was = os.stat(path)
    np.fromfile(path, "<u2")[::-1].tofile(path)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def test_a_token_file_that_was_replaced_is_refused_even_with_the_same_size_and_time(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens_of_a_run(train)
    before = Path("run/data.json").read_text()
    reverse("train.bin")
    capsys.readouterr()
    assert train(*MORE, "--total_steps", "4") == 1
    problem, fix = capsys.readouterr().err.splitlines()
    assert "the training data of run, " in problem and "train.bin, are not those that it began with" in problem
    assert "still 8000 bytes, but other tokens: crc32 " in problem
    assert fix == "  fix: bring back the file as it was, or start a new run with another --run_dir"
    assert Path("run/data.json").read_text() == before
    reverse("train.bin")
    np.append(np.fromfile("train.bin", "<u2"), np.zeros(10, "<u2")).tofile("longer.bin")
    assert train(*MORE, "--total_steps", "4", "--train_data_path", "longer.bin") == 1
    assert "8000 bytes then, 8020 bytes now" in capsys.readouterr().err


def test_the_file_for_validation_is_compared_too_unless_another_one_is_meant(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens_of_a_run(train)
    reverse("val.bin")
    capsys.readouterr()
    assert train(*MORE, "--total_steps", "4") == 1
    problem, fix = capsys.readouterr().err.splitlines()
    assert "the validation data of run, " in problem and "--allow_change valid_data_path" in fix
    assert train(*MORE, "--total_steps", "4", "--allow_change", "valid_data_path") == 0
    assert train(*MORE, "--total_steps", "5") == 0  # what was accepted is what the run goes on with
    np.fromfile("val.bin", "<u2")[:300].tofile("other.bin")
    assert train(*MORE, "--total_steps", "6", "--valid_data_path", "other.bin") == 0


def test_a_file_of_the_same_content_goes_on_from_elsewhere_and_at_any_time(train: Train) -> None:
    tokens_of_a_run(train)
    os.utime("train.bin", ns=(1, 1))
    assert train(*MORE, "--total_steps", "4") == 0
    Path("there").mkdir()
    Path("train.bin").rename("there/train.bin")
    assert train(*MORE, "--total_steps", "6", "--train_data_path", "there/train.bin") == 0


def test_a_run_of_an_earlier_version_goes_on_and_is_protected_from_then_on(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens_of_a_run(train)
    origin = Path("run/data.json")
    about = json.loads(origin.read_text())
    del about["samples"]
    origin.write_text(json.dumps(about))
    assert train(*MORE, "--total_steps", "4") == 0
    assert {**about, "samples": json.loads(origin.read_text())["samples"]} == json.loads(origin.read_text())
    reverse("train.bin")
    assert train(*MORE, "--total_steps", "6") == 1
    assert "are not those that it began with" in capsys.readouterr().err


def test_ranks_with_other_tokens_of_the_same_number_are_refused(here: Path) -> None:
    tokens = (np.arange(4000) % 290).astype("<u2")
    for number, own in enumerate((tokens, tokens[::-1])):
        Path(f"host{number}").mkdir()
        own.tofile(f"host{number}/train.bin")
    words = [small("--train_data_path", f"host{rank}/train.bin", "--run_dir", "run") for rank in range(2)]
    outcomes = run_ranks(_command, [(["train", *each],) for each in words])
    assert [outcome.code for outcome in outcomes] == [1, 1]
    assert "they differ in samples of the data" in outcomes[0].err, outcomes[0].err


def test_of_a_large_file_parts_from_all_of_it_are_compared(tmp_path: Path) -> None:
    size = 64 * PART_BYTES
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(size)
    before = sampled(path)
    assert before == sampled(path) and before["bytes"] == size
    for at in range(0, size, size // 8):  # an eighth holds at least one part as a whole
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\1" * (size // 8))
        changed = sampled(path)
        assert changed["crc32"] != before["crc32"]
        before = changed
