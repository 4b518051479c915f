"""Whole runs: from text to a model that writes, stopped and resumed, on tokens of every kind."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small import small
from helpers.warm import Warm
from torch import Tensor, nn

from drumline.cli.app import run_command
from drumline.config.model import GPTConfig
from drumline.data.opening import open_tokens
from drumline.data.tokenizer import Tokenizer
from drumline.errors import EXIT_FAILED, EXIT_STOPPED
from drumline.files.run_folder import RunFolder
from drumline.report.records import Record, read_metrics

Train = Callable[..., int]


def sha256(run: Path) -> str:
    status = RunFolder(run).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def test_one_command_goes_from_text_to_a_model_that_writes(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--total_steps", "150", "--lr", "0.01", "--log_every", "1") == 0
    said = capsys.readouterr().out
    run = Path("runs/modern-tiny")
    assert "bits/byte" in said and "sample:" in said
    assert f"drumline sample {run}" in said and f"drumline evaluate {run}" in said and sha256(run) in said
    for name in ("config.toml", "metrics.jsonl", "train.log", "tokenizer.json", "status.json", "report.html"):
        assert (run / name).stat().st_size > 0
    records = read_metrics(run / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0] - 2
    assert {"lr", "grad_norm", "tokens_per_s", "eta_s", "peak_memory_bytes"} <= records[0].keys()
    held_out = [record for record in records if "valid_loss" in record]
    assert len(held_out) == 10 and held_out[-1]["bits_per_byte"] < held_out[0]["bits_per_byte"]
    assert (run / "train.log").read_text() in said or said in (run / "train.log").read_text()


def test_a_second_start_reuses_what_was_prepared(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    (prepared,) = Path("data").iterdir()
    before = {file: file.stat().st_mtime_ns for file in prepared.iterdir() if file.suffix == ".bin"}
    assert train() == 0
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert sha256(Path("runs/modern-tiny")) == sha256(Path("runs/modern-tiny-2"))


def test_training_reports_the_text_it_skipped(train: Train, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text / "bad.txt").write_bytes(b"caf\xe9 \xff")
    assert train("--on_error", "skip") == 0
    said = capsys.readouterr().out
    assert "skipped 1 unreadable, first: " in said and "bad.txt" in said


def test_a_file_called_valid_is_validation_data_and_the_run_says_so(
    train: Train, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = "Never trained on. " * 40
    (text / "valid.txt").write_text(held_out)
    assert train("--run_dir", "run") == 0
    assert "; valid.txt is held out for validation\n" in capsys.readouterr().out
    (prepared,) = Path("data").iterdir()
    tokenizer = Tokenizer.load(prepared / "tokenizer.json")
    ids = {split: open_tokens(prepared, split=split).tokens.tolist() for split in ("train", "valid")}
    assert tokenizer.decode(ids["valid"]) == held_out + "<|endoftext|>"
    assert "Never" not in tokenizer.decode(ids["train"])


@pytest.mark.parametrize("stop", [1, 4])
def test_a_run_stopped_anywhere_and_resumed_ends_with_the_same_bits(train: Train, stop: int) -> None:
    flags = (
        "--dropout",
        "0.2",
        "--schedule",
        "wsd",
        "--save_every",
        "1",
        "--keep_checkpoints",
        "9",
        "--preset",
        "modern-tiny",
    )
    assert train("--run_dir", "whole", *flags) == 0
    assert train("--run_dir", "part", *flags) == 0
    for checkpoint in Path("part/checkpoints").iterdir():  # as if the process had died after step `stop`
        if int(checkpoint.name.removeprefix("step-")) > stop:
            checkpoint.rename(checkpoint.with_name(checkpoint.name + ".gone"))
    assert run_command(["train", "--run_dir", "part"]) == 0
    assert sha256(Path("part")) == sha256(Path("whole"))
    steps = [record["step"] for record in read_metrics(Path("part/metrics.jsonl")) if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_saves_and_says_how_to_go_on(train: Train, text: Path, tmp_path: Path) -> None:
    flags = small("--train_data_path", str(text), "--total_steps", "100000", "--run_dir", "run")
    command = [sys.executable, "-m", "drumline", "train", *flags]
    with Warm(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "| loss" in line:
                break
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    assert process.returncode == EXIT_STOPPED
    assert "everything is saved; to resume:\n  drumline train --run_dir run" in said
    stopped_at = RunFolder(tmp_path / "run").read_status()["step"]
    allow = ["--total_steps", str(stopped_at + 2), "--allow_change", "total_steps"]
    assert run_command(["train", "--run_dir", "run", *allow]) == 0
    assert RunFolder(tmp_path / "run").read_status()["step"] == stopped_at + 2


def test_a_run_goes_on_only_with_the_settings_it_had(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run_dir", "run") == 0
    assert train("--run_dir", "run", "--lr", "0.5", "--total_steps", "9") == 1
    error = capsys.readouterr().err
    assert "total_steps 6 -> 9" in error and "lr" in error and "-> 0.5" in error and "--allow_change" in error
    assert train("--run_dir", "run", "--total_steps", "9", "--allow_change", "total_steps") == 0
    assert RunFolder(Path("run")).read_status()["step"] == 9


def test_a_new_run_can_start_from_another_runs_checkpoint(train: Train) -> None:
    assert train("--run_dir", "first", "--save_every", "2", "--keep_checkpoints", "9") == 0
    assert train("--run_dir", "second", "--resume_from", "first/checkpoints/step-00000004") == 0
    assert run_command(["train", "--resume_from", "first/checkpoints/step-00000004"]) == 0
    assert run_command(["train", "--resume_from", "first/checkpoints/step-00000004", "--run_dir", "third"]) == 0
    assert sha256(Path("first")) == sha256(Path("third")) == sha256(Path("second")) == sha256(Path("runs/modern-tiny"))
    assert RunFolder(Path("second")).checkpoint(6).exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--document_mask",
        "--dtype float16",
        "--epochs 0.5",
        "--schedule constant --warmup_steps 2 --grad_clip 0",
        "--activation swiglu --n_kv_heads 1 --norm rmsnorm --positions rope --no-bias --qk_norm --no-tie_embeddings",
        "--global_batch_size 8 --weight_decay 0 --beta1 0.8 --beta2 0.9 --eps 1e-6 --min_lr_ratio 0 --seed 3",
        "--gradient_accumulation_steps 2 --sample_prompt All --valid_fraction 0.2",
    ],
)
def test_every_kind_of_setting_trains(train: Train, flags: str) -> None:
    assert train(*flags.split(), "--run_dir", "run") == 0
    config = tomllib.loads(Path("run/config.toml").read_text())
    assert math.isfinite(read_metrics(Path("run/metrics.jsonl"))[0]["loss"])
    if "accumulation" in flags or "global" in flags:
        assert config["batch"]["global_batch_size"] == 8 and config["batch"]["batch_size"] == 4


def test_accumulated_micro_batches_give_the_curve_of_one_large_batch(train: Train) -> None:
    assert train("--run_dir", "one", "--batch_size", "8") == 0
    assert train("--run_dir", "two", "--batch_size", "4", "--gradient_accumulation_steps", "2") == 0
    one, two = (
        [r["loss"] for r in read_metrics(Path(f"{run}/metrics.jsonl")) if "loss" in r] for run in ("one", "two")
    )
    assert one == pytest.approx(two, rel=1e-5)


def test_documents_that_break_a_run_are_named(train: Train, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--recipe classic --lr 1e30 --grad_clip 0 --max_nonfinite 2 --run_dir run --total_steps 50"
    assert train(*flags.split()) == EXIT_FAILED
    error = capsys.readouterr().err
    assert "2 such steps in a row" in error and ".txt" in error and "lower --lr" in error
    assert RunFolder(Path("run")).read_status()["state"] == "failed"


class TwoLayers(nn.Module):
    """A user's model: any nn.Module whose forward gives (anything, summed loss)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, 8)
        self.head = nn.Linear(8, config.vocab_size)

    def forward(self, input_ids: Tensor, *, targets: Tensor) -> tuple[None, Tensor]:
        logits = self.head(self.embedding(input_ids))
        return None, nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )


class Collector:
    """A user's sink."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mine.txt"

    def write(self, record: Record) -> None:
        with self.file.open("a") as out:
            out.write(f"{record['step']}\n")

    def close(self) -> None:
        with self.file.open("a") as out:
            out.write("closed\n")


def story() -> list[str]:
    """A user's source."""
    return [f"once upon a time {n} " * 20 for n in range(30)]


def test_users_bring_their_own_model_source_and_sink_by_name(train: Train) -> None:
    here = f"{__name__}:"
    flags = [
        "--model",
        here + "TwoLayers",
        "--sink",
        here + "Collector",
        "--train_data_path",
        here + "story",
        "--run_dir",
        "run",
    ]
    assert train(*flags) == 0
    assert Path("run/mine.txt").read_text().split()[-2:] == ["6", "closed"]
    assert train("--run_dir", "run2", "--model", here + "NoSuchModel") == 1


class OtherLoss(TwoLayers):
    """The same model with a loss as other trainers want it."""

    def __init__(self, config: GPTConfig, loss: str) -> None:
        super().__init__(config)
        self.loss = loss

    def forward(self, input_ids: Tensor, *, targets: Tensor) -> Any:
        logits = self.head(self.embedding(input_ids))
        if self.loss == "logits":
            return logits
        return logits, nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction=self.loss)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        ("mean", "for 64 tokens cannot be a sum: for random targets, that is at least 64 x log("),
        ("none", "the loss that forward returns is a tensor of shape (4, 16), not a tensor with one number"),
        ("logits", "forward returns Tensor, not a pair (logits, loss)"),
    ],
)
def test_a_model_whose_loss_is_no_sum_is_refused_with_what_to_return(
    train: Train, capsys: pytest.CaptureFixture[str], loss: str, problem: str
) -> None:
    assert train("--run_dir", "run", "--model", f"{__name__}:OtherLoss", "--model_options", f"loss={loss}") == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert problem in error and "reduction='sum'" in fix
    assert train("--run_dir", "sum", "--model", f"{__name__}:OtherLoss", "--model_options", "loss=sum") == 0


def linear(config: GPTConfig) -> nn.Module:
    """A module that is no language model."""
    return nn.Linear(4, config.vocab_size)


def test_a_model_that_takes_no_targets_is_refused(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run_dir", "run", "--model", f"{__name__}:linear") == 1
    assert "the forward of Linear does not take targets" in capsys.readouterr().err


@pytest.mark.needs("compiler")
def test_a_compiled_model_gives_the_same_curve(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    # All of torch.compile but its last stage, in which g++ would take over a minute for this model.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert train("--run_dir", "plain", "--total_steps", "3") == 0
    assert train("--run_dir", "compiled", "--compile", "--total_steps", "3") == 0
    plain, compiled = (
        [r["loss"] for r in read_metrics(Path(f"{run}/metrics.jsonl")) if "loss" in r] for run in ("plain", "compiled")
    )
    assert plain == pytest.approx(compiled, rel=1e-4)
    names = [
        json.loads(Path(f"{run}/checkpoints/step-00000003/run.json").read_text())["facts"]
        for run in ("plain", "compiled")
    ]
    assert names[0] == names[1]


def test_short_contexts_come_first_and_a_context_that_cannot_be_divided_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--short_contexts", "0.5", "--run_dir", "run") == 0
    assert "; the first 3 with a context of 4" in capsys.readouterr().out
    assert train("--short_contexts", "0", "--run_dir", "other") == 0
    assert sha256(Path("run")) != sha256(Path("other"))
    assert train("--short_contexts", "0.5", "--context", "14", "--run_dir", "odd") == 1
    assert "a context of 14 tokens cannot be split into 4 short ones" in capsys.readouterr().err


def test_a_rate_for_adamw_given_to_muon_is_pointed_out(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    hint = "values near 0.035 suit Muon, and --recipe classic uses AdamW"
    for flags, pointed_out in (((), False), (("--lr", "1e-3"), True), (("--lr", "1e-3", "--recipe", "classic"), False)):
        assert train(*flags, "--run_dir", " ".join(("run", *flags))) == 0
        assert (hint in capsys.readouterr().out) is pointed_out


def test_a_finished_run_started_again_says_so_and_how_to_lengthen_it(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "my run", "--total_steps", "3") == 0
    assert "finished already" not in capsys.readouterr().out
    assert train("--run_dir", "my run", "--total_steps", "3") == 0
    said = capsys.readouterr().out
    assert "this run had finished already, at step 3; to train it further:" in said
    longer = next(line for line in said.splitlines() if "--allow_change" in line)
    assert longer == "  drumline train --run_dir 'my run' --total_steps 6 --allow_change total_steps"
    assert train("--run_dir", "my run", "--total_steps", "6", "--allow_change", "total_steps") == 0
    assert "step  6/6 | loss" in capsys.readouterr().out


def test_what_is_proposed_at_the_end_of_a_run_works_for_that_run(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "my run", "--valid_fraction", "0") == 0
    proposed = capsys.readouterr().out.split("next:\n")[1].splitlines()
    assert proposed == ["  drumline sample 'my run'", "  drumline runs"]  # nothing to evaluate on, and no code to write
    for words in map(shlex.split, proposed):
        assert run_command(words[1:]) == 0


@pytest.mark.parametrize("kind", ["tokens", "a model that does not write", "chinese"])
def test_no_text_is_proposed_that_the_run_cannot_write(
    train: Train, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (np.arange(4000) % 290).astype("<u2").tofile("train.bin")
    Path("zh.txt").write_text("床前明月光，疑是地上霜。举头望明月，低头思故乡。\n" * 60)
    flags = {
        "tokens": ("--train_data_path", "train.bin"),
        "a model that does not write": ("--model", f"{__name__}:TwoLayers"),
        "chinese": ("--train_data_path", "zh.txt"),
    }
    assert train(*flags[kind], "--run_dir", "run") == 0
    proposed = capsys.readouterr().out.split("next:\n")[1]
    assert "--prompt" not in proposed and ("sample" in proposed) is (kind == "chinese")
    for words in map(shlex.split, proposed.splitlines()):
        assert run_command(words[1:]) == 0
