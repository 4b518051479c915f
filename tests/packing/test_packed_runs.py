"""Whole runs with --packing best_fit: the same on any ranks, resumed, blamed; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.ranks import train_ranks
from helpers.small import small

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder

PACKED = ["--packing", "best_fit"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows, and their tokens, prepared for a context of 16."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"word {n} " * (1 + n * 7 % 13)} for n in range(200)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "prepare rows.jsonl --out tokens --vocab_size 300 --packing best_fit --context 16"
    assert run_command(words.split()) == 0
    return tmp_path


def sha256(run: str) -> str:
    status = RunFolder(Path(run)).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def train(*flags: str) -> int:
    return run_command(["train", "--train_data_path", "tokens", *small(*flags)])


def test_prepare_computes_the_index_and_says_what_it_gains(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "prepare rows.jsonl --out tokens --vocab_size 300 --packing best_fit --context 24"
    assert run_command(words.split()) == 0  # beside the tokens that are there already
    assert {path.name for path in (text / "tokens").glob("*.packed-*.bin")} == {
        *("train.packed-16.bin", "train.packed-24.bin")
    }
    said = capsys.readouterr().out
    assert "% of documents whole (stream: " in said and "% padding" in said
    assert "drumline train --train_data_path tokens --packing best_fit --context 24" in said


@pytest.mark.parametrize("mask", [[], ["--document_mask"]], ids=["no mask", "mask"])
def test_two_ranks_and_a_resumed_run_end_with_the_same_bits(text: Path, mask: list[str]) -> None:
    flags = [*PACKED, *mask, "--bitwise", "--batch_size", "2", "--global_batch_size", "4"]
    assert train("--run_dir", "one", *flags) == 0
    assert train("--run_dir", "resumed", *flags, "--save_every", "3") == 0
    shutil.rmtree(RunFolder(Path("resumed")).checkpoint(6))
    assert train("--run_dir", "resumed", *flags, "--save_every", "3") == 0
    train_ranks(2, "--train_data_path", "tokens", "--run_dir", "two", *small(*flags))
    assert sha256("one") == sha256("two") == sha256("resumed")


def test_another_context_is_packed_at_the_start_of_the_run(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run_dir", "run", *PACKED, "--context", "32") == 0
    assert (text / "tokens/train.packed-32.bin").exists()
    assert "best_fit: " in capsys.readouterr().out


def test_a_resumed_run_keeps_its_packing(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run_dir", "run", *PACKED) == 0
    longer = ["--run_dir", "run", "--allow_change", "total_steps", "--total_steps"]
    assert train(*longer, "8") == 0
    assert 'packing = "best_fit"' in Path("run/config.toml").read_text()
    capsys.readouterr()
    assert train(*longer, "9", "--packing", "stream") == 1
    assert "packing" in capsys.readouterr().err
    assert train(*longer, "9", "--packing", "stream", "--allow_change", "packing") == 0


def test_a_mix_is_not_packed(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("prepare rows.jsonl --out other --tokenizer tokens/tokenizer.json".split()) == 0
    capsys.readouterr()
    assert train("--train_data_path", "tokens:1,other:1", *PACKED) == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert (
        "--packing best_fit is for one folder of tokens, and tokens:1,other:1 is a mix" in error
        and "drop --packing" in fix
    )


def test_blame_lists_and_measures_the_documents_of_packed_windows(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "run", *PACKED, "--document_mask", "--save_every", "3") == 0
    recorded = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    (loss,) = [each["loss"] for each in recorded if each["step"] == 4 and "loss" in each]
    capsys.readouterr()
    assert run_command(["blame", "run", "--step", "4", "--losses"]) == 0
    assert f"loss {loss:.4f} computed again, {loss:.4f} recorded" in capsys.readouterr().out
    assert run_command(["replay", "run", "--step", "6"]) == 0


def test_what_cannot_be_packed_is_refused_in_two_lines(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.arange(400, dtype="<u2").tofile("other.bin")
    Path("chats.jsonl").write_text(
        json.dumps({"messages": [{"role": r, "content": "a"} for r in ("user", "assistant")]}) + "\n"
    )
    Path("skip.json").write_text("{}")
    prepare = ["prepare", "rows.jsonl", "--out", "again"]
    refused = {
        "no list of its documents": ["train", *small(*PACKED, "--train_data_path", "other.bin", "--vocab_size", "400")],
        "is for --packing stream": [
            "train",
            *small(*PACKED, "--train_data_path", "tokens", "--skip_list", "skip.json"),
        ],
        "without --context": [*prepare, *PACKED],
        "without --packing best_fit": [*prepare, "--context", "16"],
        "context is 0": [*prepare, *PACKED, "--context", "0"],
        "conversations are packed whole": [
            *("prepare", "chats.jsonl", "--out", "again", "--format", "chat", *PACKED, "--context", "16")
        ],
    }
    for problem, words in refused.items():
        capsys.readouterr()
        assert run_command(words) == 1, problem
        said = capsys.readouterr().err
        assert problem in said and "Traceback" not in said and len(said.strip().splitlines()) == 2, said
    assert not Path("again").exists()
