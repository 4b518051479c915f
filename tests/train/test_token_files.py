"""Token files of other trainers: trained on as they are, with a vocabulary that their ids fit into."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.small import small

from drumline.cli.app import run_command
from drumline.files import stored_config
from drumline.files.run_folder import RunFolder

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
