"""Schedulers of torch give the rates of every step, however often a run is stopped; scale_lr multiplies them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from drumline.errors import ConfigError
from drumline.report.records import read_metrics
from drumline.trainer.trainer import Trainer

Make = Callable[[torch.optim.Optimizer], Any]


def trainer(run_dir: Path, make: Make | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    scheduler = make(optimizer) if make else None
    more: dict[str, Any] = {"loss": F.mse_loss, "batch_size": 4, "device": "cpu", "scheduler": scheduler, **settings}
    return Trainer(model, data, optimizer, run_dir=run_dir, **more)


def rates(run_dir: Path) -> list[float]:
    return [record["lr"] for record in read_metrics(run_dir / "metrics.jsonl")]


def by_hand(make: Make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler, values = make(optimizer), []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


SCHEDULERS: dict[str, Make] = {
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=8),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10),
    "warmup": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_gives_the_rates_that_it_gives_by_hand_in_one_go_or_resumed(tmp_path: Path, name: str) -> None:
    make = SCHEDULERS[name]
    whole = trainer(tmp_path / "whole", make).fit(total_steps=9, log_every=1)
    assert rates(tmp_path / "whole") == pytest.approx(by_hand(make, 9))
    for steps in (4, 9):
        parts = trainer(tmp_path / "parts", make).fit(total_steps=steps, log_every=1)
    assert parts.weights_sha256 == whole.weights_sha256 and rates(tmp_path / "parts") == rates(tmp_path / "whole")


def test_a_scheduler_may_be_stepped_once_per_epoch_and_a_run_may_go_back(tmp_path: Path) -> None:
    make = SCHEDULERS["step"]
    run = trainer(tmp_path, make, schedule_unit="epoch")
    run.fit(epochs=4, log_every=1)
    assert rates(tmp_path) == pytest.approx([rate for rate in by_hand(make, 4) for _ in range(3)])  # 3 steps each
    lr = run.setup.lr
    assert lr is not None and lr(0) is None
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_scale_lr_multiplies_every_rate_by_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch: dict[str, Any] = {"global_batch_size": 12, "base_batch_size": 3}
    trainer(tmp_path / "linear", scale_lr="linear", **batch).fit(total_steps=2, log_every=1)
    assert rates(tmp_path / "linear") == pytest.approx([0.4, 0.4])
    assert "batch_size 4 x 1 rank x 3 accumulated = 12 samples" in (said := capsys.readouterr().out)
    assert "lr     0.1 x 4 (scaled to the batch) by SGD" in said
    trainer(tmp_path / "sqrt", SCHEDULERS["cosine"], scale_lr="sqrt", **batch).fit(total_steps=3, log_every=1)
    assert rates(tmp_path / "sqrt") == pytest.approx([2 * rate for rate in by_hand(SCHEDULERS["cosine"], 3)])
    trainer(tmp_path / "by", lr=lambda step: 0.01, scale_lr="linear", **batch).fit(total_steps=1)
    assert rates(tmp_path / "by") == pytest.approx([0.04])


def test_what_cannot_set_the_rate_of_a_step_alone_is_refused(tmp_path: Path) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("belong together", {"scale_lr": "linear"}),
        ("both set the learning rate", {"lr": lambda step: 0.1, "make": SCHEDULERS["step"]}),
        ("ReduceLROnPlateau depends on past losses", {"make": lr_scheduler.ReduceLROnPlateau}),
        ("another optimizer", {"make": lambda _: SCHEDULERS["step"](other)}),
    ]
    for problem, settings in refused:
        with pytest.raises(ConfigError, match=problem):
            trainer(tmp_path, **settings)
