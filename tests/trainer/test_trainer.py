"""The one loop, on any model: it resumes to the same bits, stops when asked, and skips what is not finite."""

import json
import math
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.warm import Warm
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from drumline.cli.app import run_command
from drumline.errors import CheckpointError, ConfigError, TrainingError
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics
from drumline.train.setup import due
from drumline.train.step import StepResult
from drumline.trainer.callbacks import Callback
from drumline.trainer.trainer import Trainer


def make(run_dir: Path, *, samples: int = 50, dropout: float = 0.5, **settings: Any) -> Trainer:
    torch.manual_seed(7)
    inputs = torch.randn(samples, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
    return Trainer(
        model,
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=F.mse_loss,
        run_dir=run_dir,
        device="cpu",
        **{"batch_size": 8, **settings},
    )


def test_any_model_learns_any_dataset(tmp_path: Path) -> None:
    result = make(tmp_path, dropout=0.0).fit(epochs=60, log_every=20)
    losses = [record["loss"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert result.state == "finished" and losses[-1] < losses[0] / 10
    assert RunFolder(tmp_path).read_status()["weights_sha256"] == result.weights_sha256


def test_epochs_are_counted_in_samples_and_save_every_in_epochs(tmp_path: Path) -> None:
    result = make(tmp_path, keep_checkpoints=9).fit(epochs=4, save_every=2)
    assert result.step == 25  # 4 epochs of 50 samples in steps of 8
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000013", "step-00000025"]


@given(samples=st.integers(1, 60), batch=st.integers(1, 20), every=st.integers(1, 4), epochs=st.integers(1, 12))
def test_something_is_due_once_in_each_interval_and_at_the_end(
    samples: int, batch: int, every: int, epochs: int
) -> None:
    interval, last = every * Fraction(samples, batch), math.ceil(Fraction(epochs * samples, batch))
    due_steps = [step for step in range(1, last + 1) if due(step, interval, last)]
    expected = {math.ceil(interval * k) for k in range(1, math.floor(Fraction(last) / interval) + 1)} | {last}
    assert due_steps == sorted(expected)


def test_a_run_stopped_anywhere_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole").fit(total_steps=20)
    for stop in (1, 6, 19):
        part = make(tmp_path / f"stop{stop}").fit(total_steps=stop)
        assert part.weights_sha256 != whole.weights_sha256
        rest = make(tmp_path / f"stop{stop}").fit(total_steps=20)
        assert rest.weights_sha256 == whole.weights_sha256


def test_an_exported_checkpoint_is_given_to_the_script_as_the_export_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = make(Path("whole")).fit(total_steps=20)
    make(Path("run")).fit(total_steps=6)
    capsys.readouterr()
    assert run_command(["checkpoint", "export", "run", "--out", "six.pt"]) == 0
    said = "to resume from it, in the script: Trainer(..., resume_from='six.pt')"
    assert capsys.readouterr().out.splitlines()[-1] == said
    assert make(Path("again"), resume_from="six.pt").fit(total_steps=20).weights_sha256 == whole.weights_sha256


def test_random_draws_depend_on_the_step_and_not_on_what_happened_before(tmp_path: Path) -> None:
    class Noise(Dataset[tuple[Tensor, Tensor]]):
        """Draws its samples anew each time, as toy datasets do."""

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.randn(6), torch.zeros(1)

    def run(where: Path, steps: int) -> str:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 1), nn.Dropout(0.3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return (
            Trainer(model, Noise(), optimizer, loss=F.mse_loss, run_dir=where, batch_size=4, device="cpu")
            .fit(total_steps=steps)
            .weights_sha256
        )

    run(tmp_path / "b", 3)
    torch.rand(1000)
    assert run(tmp_path / "a", 8) == run(tmp_path / "b", 8)


def test_accumulating_gives_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{size}", dropout=0.0, batch_size=size, global_batch_size=8).fit(total_steps=5).loss
        for size in (8, 4, 1)
    ]
    assert runs[1:] == pytest.approx([runs[0]] * 2, rel=1e-5)


def test_a_model_that_gives_its_own_loss_needs_no_loss_function(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            predicted = self.layer(features)
            return predicted, F.mse_loss(predicted, labels)

    data = [{"features": torch.ones(3) * i, "labels": torch.tensor([float(i)])} for i in range(8)]
    model = Own()
    trainer = Trainer(
        model, data, torch.optim.SGD(model.parameters(), lr=0.001), run_dir=tmp_path, batch_size=4, device="cpu"
    )
    first = trainer.fit(epochs=1).loss
    assert trainer.fit(epochs=60).loss < first


def test_a_step_that_is_not_finite_is_skipped_counted_and_leaves_the_weights_alone(tmp_path: Path) -> None:
    trainer = make(tmp_path, samples=40)
    dataset = trainer.setup.batches
    clean = dataset.micro_batch

    def poisoned(step: int, index: int) -> Any:
        inputs, targets = clean(step, index)
        return (inputs * math.nan if step == 2 else inputs), targets

    dataset.micro_batch = poisoned  # type: ignore[method-assign]
    result = trainer.fit(total_steps=6)
    assert math.isfinite(result.loss)
    assert RunFolder(tmp_path).read_status()["skipped_steps"] == 1
    log = (tmp_path / "train.log").read_text()
    assert "step 3: loss nan" in log and "recomputing the step" in log and "NaN or Inf again" in log
    assert all(torch.isfinite(p).all() for p in trainer.setup.step.model.parameters())


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_run_and_name_the_documents(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_nonfinite=3)
    clean = trainer.setup.batches.micro_batch
    trainer.setup.batches.micro_batch = lambda step, index: (clean(step, index)[0] * math.inf, clean(step, index)[1])  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"3 such steps in a row; its documents: sample \d+"):
        trainer.fit(total_steps=10)
    status = RunFolder(tmp_path).read_status()
    assert status["state"] == "failed" and "3 such steps in a row" in status["cause"]


def test_a_run_folder_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    make(tmp_path).fit(total_steps=2)
    with pytest.raises(CheckpointError, match="batch_size 8 -> 4") as raised:
        make(tmp_path, batch_size=4).fit(total_steps=4)
    assert "run_dir" in raised.value.fix


def test_a_start_that_is_refused_changes_nothing_about_the_run(tmp_path: Path) -> None:
    make(tmp_path).fit(total_steps=2)
    before = (tmp_path / "status.json").read_text()
    with pytest.raises(CheckpointError):
        make(tmp_path, seed=9).fit(total_steps=4)
    assert (tmp_path / "status.json").read_text() == before


def test_a_length_is_given_once_and_is_not_nothing(tmp_path: Path) -> None:
    for length in ({}, {"epochs": 1, "total_steps": 1}, {"total_steps": 0}, {"epochs": -1}):
        with pytest.raises(ConfigError):
            make(tmp_path).fit(**length)  # type: ignore[arg-type]


def test_records_of_steps_that_are_done_again_appear_once(tmp_path: Path) -> None:
    make(tmp_path).fit(total_steps=4, log_every=1)
    with (tmp_path / "metrics.jsonl").open("a") as file:  # what a process wrote between its last save and its death
        file.write(json.dumps({"step": 5, "loss": 9.9}) + '\n{"step": 6, "lo')
    make(tmp_path).fit(total_steps=6, log_every=1)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


STOPPABLE = """
import sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from drumline import Trainer
torch.manual_seed(0)
model = nn.Linear(4, 1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
result = Trainer(model, data, torch.optim.SGD(model.parameters(), lr=0.01), loss=F.mse_loss, run_dir=sys.argv[1],
                 batch_size=4, device="cpu").fit(total_steps=int(sys.argv[2]), log_every=1)
print("ENDED", result.state, result.step, result.weights_sha256)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_at_a_saved_step_and_it_goes_on_to_the_same_bits(tmp_path: Path, signum: int) -> None:
    def start(steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", STOPPABLE, str(tmp_path / "run"), str(steps)]
        return Warm(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    with start(1_000_000) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "| loss" in line:
                break
        process.send_signal(signum)
        ended = process.stdout.read().splitlines()[-1].split()
    assert process.returncode == 0 and ended[:2] == ["ENDED", "stopped"]
    stopped_at = int(ended[2])
    assert RunFolder(tmp_path / "run").checkpoint(stopped_at).exists()
    assert RunFolder(tmp_path / "run").read_status()["state"] == "stopped"
    with start(stopped_at + 5) as process:
        assert process.stdout is not None
        resumed = process.stdout.read().splitlines()[-1].split()
    (tmp_path / "run").rename(tmp_path / "first")
    with start(stopped_at + 5) as process:
        assert process.stdout is not None
        assert process.stdout.read().splitlines()[-1].split() == resumed


@pytest.mark.parametrize("name", ["save_every", "log_every", "eval_every"])
def test_an_interval_of_nothing_is_refused(tmp_path: Path, name: str) -> None:
    for value in (0, -1):
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            make(tmp_path).fit(epochs=1, **{name: value})
    with pytest.raises(ConfigError, match="save_every is 0"):
        make(tmp_path, save_every=0).fit(epochs=1)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_interrupted_at_once_counts_as_stopped(tmp_path: Path) -> None:
    class SecondCtrlC(Callback):
        def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, callbacks=[SecondCtrlC()]).fit(epochs=1)
    status = RunFolder(tmp_path).read_status()
    assert (status["state"], status["cause"]) == ("stopped", "interrupted")
