"""One training step for tests: the loop's own, with its two halves run one after the other."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from drumline.parallel.stragglers import Stopwatch
from drumline.parallel.strategies import Plain, Strategy
from drumline.train.step import Backward, Objective, Precision, Step, StepResult, Votes

CPU = torch.device("cpu")


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    strategy: Strategy | None = None,
    *,
    weight: int,
    precision: Precision | None = None,
    grad_clip: float = 0.0,
) -> Step:
    strategy, precision = strategy or Plain(model), precision or Precision.of(CPU, torch.float32)
    backward = Backward(objective, precision, weight, strategy.scale)
    return Step(model, optimizer, strategy, backward, precision, grad_clip)


def train_step(
    step: Step, micro_batches: Iterable[Any], *, lr: float | None, stop: bool = False, watch: Stopwatch | None = None
) -> StepResult:
    return step.update(step.gradient(micro_batches, votes=Votes(stop=stop), watch=watch), lr=lr)()
