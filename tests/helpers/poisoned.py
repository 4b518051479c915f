"""A small run on numbers some of which may be poison, and what it wrote down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from drumline.report.records import read_metrics
from drumline.train.loop import FitResult
from drumline.trainer.trainer import Trainer

SAMPLES, BATCH = 120, 12  # in micro-batches of 2: three ranks have two each; ten steps see each sample once


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Some samples may be poison: everything computed from them is wrong."""

    def __init__(self, poison: dict[int, float]) -> None:
        self._inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
        self._poison = poison

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._inputs[index].sum(0, keepdim=True) * self._poison.get(index, 1.0)


def make(run_dir: str | Path, *, poison: dict[int, float] | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    return Trainer(
        model,
        Numbers(poison or {}),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=F.mse_loss,
        run_dir=run_dir,
        device="cpu",
        **{"batch_size": 2, "global_batch_size": BATCH, "bitwise": True, **settings},
    )


def fit(run_dir: str | Path, *, steps: int = 5, save_every: int = 2, **settings: Any) -> FitResult:
    rules = {name: settings.pop(name) for name in ("spike_factor", "max_rollbacks") if name in settings}
    trainer = make(run_dir, **settings)
    if rules:
        trainer.setup.guard_rules = replace(trainer.setup.guard_rules, **rules)
    return trainer.fit(total_steps=steps, log_every=1, save_every=save_every)


def sample_of(step: int, *, micro_batch: int = 0, **settings: Any) -> int:
    """One of the samples that a step sees, counted from 1."""
    return int(make("unused", **settings).setup.batches.names(step - 1, micro_batch)[0].removeprefix("sample "))


def events(run_dir: str | Path, kind: str) -> list[dict[str, Any]]:
    lines = (Path(run_dir) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def steps(run_dir: str | Path) -> list[int]:
    return [record["step"] for record in read_metrics(Path(run_dir) / "metrics.jsonl") if "loss" in record]
