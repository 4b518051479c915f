"""Validation with metrics, callbacks and sinks: what a script sees of its run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from drumline import Callback, Trainer
from drumline.errors import ConfigError
from drumline.report.records import read_metrics


class Seen(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def on_step(self, trainer: Trainer, step: int, result: Any) -> None:
        assert result.loss > 0
        self.seen.append(("step", step))

    def on_evaluate(self, trainer: Trainer, step: int, record: dict[str, Any]) -> None:
        self.seen.append(("evaluate", (step, sorted(record))))

    def on_save(self, trainer: Trainer, step: int, path: Path) -> None:
        assert (path / "manifest.json").exists()
        self.seen.append(("save", step))

    def on_end(self, trainer: Trainer, result: Any) -> None:
        self.seen.append(("end", result.state))

    def of(self, kind: str) -> list[Any]:
        return [value for each, value in self.seen if each == kind]


def accuracy(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(1) == target).float().mean()


def trainer(run_dir: str | Path, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.argmax(1))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    held_out = TensorDataset(inputs[:21], inputs[:21].argmax(1))
    more: dict[str, Any] = {"valid_dataset": held_out, "metrics": {"accuracy": accuracy}, "batch_size": 8, **settings}
    return Trainer(model, data, optimizer, run_dir=run_dir, device="cpu", **more)


def test_validation_and_metrics_are_means_over_all_samples_once_per_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tmp_path)
    run.fit(epochs=3)
    evaluated = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "valid_loss" in record]
    assert [record["step"] for record in evaluated] == [8, 16, 24]
    assert run.model.training
    with torch.no_grad():
        held_out: Any = run.valid_dataset
        logits, target = run.model(held_out.tensors[0]), held_out.tensors[1]
    assert evaluated[-1]["valid_accuracy"] == pytest.approx(accuracy(logits, target).item())
    assert evaluated[-1]["valid_loss"] == pytest.approx(nn.functional.cross_entropy(logits, target).item(), rel=1e-5)
    said = capsys.readouterr().out
    assert f"validation loss {evaluated[-1]['valid_loss']:.4f} | accuracy {evaluated[-1]['valid_accuracy']:.4f}" in said


def on_ranks() -> list[float]:
    run = trainer("ranks", global_batch_size=16)
    run.fit(total_steps=2, eval_every=1)
    return [record["valid_accuracy"] for record in read_metrics(Path("ranks/metrics.jsonl")) if "valid_loss" in record]


def test_ranks_share_the_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = run_ranks(on_ranks, [(), ()])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    trainer("alone", global_batch_size=16).fit(total_steps=2, eval_every=1)
    alone = [record["valid_accuracy"] for record in read_metrics(Path("alone/metrics.jsonl")) if "valid_loss" in record]
    assert outcomes[0].value == pytest.approx(alone)


def test_a_validation_dataset_changes_nothing_about_the_training(tmp_path: Path) -> None:
    hashes = {
        trainer(tmp_path / name, **more).fit(total_steps=6, eval_every=2).weights_sha256
        for name, more in {"with": {}, "without": {"valid_dataset": None}, "workers": {"num_workers": 1}}.items()
    }
    assert len(hashes) == 1


def test_callbacks_are_called_at_their_moments(tmp_path: Path) -> None:
    seen = Seen()
    trainer(tmp_path, callbacks=[seen]).fit(epochs=2, save_every=1, evaluate=lambda: {"extra": 1.0})
    assert seen.of("step") == list(range(1, 17))
    assert seen.of("evaluate") == [(step, ["extra", "valid_accuracy", "valid_loss"]) for step in (8, 16)]
    # A checkpoint is written while training goes on: of two that are done between two steps, the newer one is told.
    assert seen.of("save") in ([8, 16], [16]) and seen.of("end") == ["finished"]
    assert seen.seen[-1] == ("end", "finished")


class Listed:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.closed = False

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def test_sinks_get_every_record_and_tensorboard_is_one_by_name(tmp_path: Path) -> None:
    listed = Listed()
    trainer(tmp_path, sinks=["tensorboard", listed]).fit(total_steps=2, log_every=1)
    assert [record["step"] for record in listed.records if "loss" in record] == [1, 2] and listed.closed
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    with pytest.raises(ConfigError, match="there is no sink 'tensorbord'") as raised:
        trainer(tmp_path, sinks=["tensorbord"])
    assert raised.value.fix == "did you mean tensorboard?"
