"""Rows of a model that no token has, because its vocabulary was rounded up: never sampled, and of no probability."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.pretrained import tensors_in, written
from safetensors.torch import save_file
from torch.nn import functional as F

from drumline.cli.app import run_command
from drumline.data.opening import open_tokens
from drumline.data.tokenizer import Tokenizer
from drumline.generate.inference import evaluate_run, writing_run
from drumline.generate.loading import load_run
from drumline.model.gpt import GPT
from drumline.report.records import read_metrics

Train = Callable[..., int]
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Rounded(nn.Module):
    "Finds the last row likelier than all others, and after it one that is a token."

    def __init__(self, shape):
        super().__init__()
        scores = torch.zeros(shape.vocab_size)
        scores[-1], scores[66] = 90.0, 60.0
        self.scores = nn.Parameter(scores)

    def forward(self, input_ids, targets=None):
        logits = self.scores.expand(*input_ids.shape, -1)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
"""


def said(run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """What `sample` and `chat` write."""
    capsys.readouterr()
    settings = ["--max_tokens", "8", "--device", "cpu"]
    assert run_command(["sample", run, *settings]) == 0
    sampled = capsys.readouterr().out.rstrip("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run_command(["chat", run, *settings]) == 0
    return sampled, capsys.readouterr().out.rstrip("\n")


def test_a_custom_model_writes_only_tokens_in_training_and_afterwards(
    here: Path, train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "rounded_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(here))
    assert train("--model", "rounded_model:Rounded", "--lr", "1e-9", "--run_dir", "run", "--eval_every", "3") == 0
    shown = capsys.readouterr().out
    tokenizer = Tokenizer.load(here / "run/tokenizer.json")
    assert tokenizer.vocab_size < load_run(here / "run").model.scores.numel()  # type: ignore[union-attr, operator]
    text = tokenizer.decode([66])
    lines = [json.loads(line)["text"] for line in (here / "run/samples.jsonl").read_text().splitlines()]
    assert lines and {*"".join(lines)} == {text} and f"  | {text * 120}" in shown
    assert said("run", capsys, monkeypatch) == (text * 8, text * 8)


def test_a_model_from_elsewhere_writes_only_tokens(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    folder = written(here / "model", "GPT2")
    tensors = tensors_in(folder)
    width = tensors["transformer.wte.weight"].size(1)
    tensors["transformer.ln_f.weight"].zero_()
    tensors["transformer.ln_f.bias"].fill_(1.0)
    tensors["transformer.wte.weight"].zero_()
    tensors["transformer.wte.weight"][-1], tensors["transformer.wte.weight"][66] = 90.0 / width, 60.0 / width
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert run_command(["import", "model", "-o", "run"]) == 0
    text = Tokenizer.load(here / "run/tokenizer.json").decode([66])
    assert said("run", capsys, monkeypatch) == (text * 8, text * 8)


def test_held_out_text_is_judged_by_the_probabilities_of_tokens_alone(train: Train, tmp_path: Path) -> None:
    assert train("--run_dir", "run", "--valid_fraction", "0.3", "--eval_windows", "99", "--total_steps", "1") == 0
    run = load_run(Path("run"))
    assert isinstance(run.model, GPT) and run.tokenizer is not None
    known = run.tokenizer.vocab_size
    assert known < run.model.config.vocab_size == len(run.model.train().head_weight)
    (prepared,) = Path("data").iterdir()
    tokens = open_tokens(prepared, split="valid")
    whole = torch.from_numpy(tokens.read(0, 16 * ((len(tokens) - 1) // 16) + 1))
    inputs, targets = whole[:-1].view(-1, 16), whole[1:].view(-1, 16)
    with torch.no_grad():
        every = run.model.train()(inputs)[0]
        some = run.model.eval()(inputs)[0]
        summed = run.model(inputs, targets=targets)[1]
    assert torch.equal(every[..., :known], some) and every.size(-1) > known
    alone, shared = (F.cross_entropy(each.flatten(0, 1), targets.flatten()).item() for each in (some, every))
    assert summed.item() / targets.numel() == pytest.approx(alone, rel=1e-5) and alone < shared - 0.01
    step, evaluation = evaluate_run(Path("run"), data=None, split="valid", batch_size=2, device="cpu")
    assert evaluation.loss == pytest.approx(alone, abs=0.01)  # over the rest of the last window too
    (last,) = [
        r["valid_loss"] for r in read_metrics(Path("run/metrics.jsonl")) if r["step"] == step and "valid_loss" in r
    ]
    assert last == pytest.approx(evaluation.loss, rel=1e-5)
    assert writing_run(Path("run"), device="cpu").model.config.vocab_size == known  # type: ignore[union-attr]
