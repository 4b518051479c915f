"""The length of a run: in steps, from --epochs or --minutes, and in time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from drumline.config import TrainConfig
from drumline.data import Batches, mix
from drumline.files import RunFolder
from drumline.parallel import Pulse, World
from drumline.report import Record, Records
from drumline.train.setup import Setup
from drumline.units import duration

Trial = tuple[Setup, Callable[[Pulse], Record] | None]
_TRIAL_S, _WARM_UPS, _FEWEST = 4.0, 2, 3
_LONG_S = 60.0
_EVALUATIONS = 11
"""One per tenth of the run, and about as much again for what happens at its end."""


def steps_in_epochs(config: TrainConfig, batches: Batches) -> int:
    assert config.batch.epochs is not None
    return math.ceil(config.batch.epochs * batches.items / batches.plan.sequences)


def steps_in_minutes(minutes: float, folder: RunFolder, world: World, trial: Callable[[], Trial]) -> int:
    """The number of steps that this machine can do in that time. A resumed run keeps the number from its start.

    trial: a setup to measure with; its weights change, so it is not the one to train
    """
    chosen: int | None = world.on_rank0(lambda: folder.read_status().get("total_steps"))
    return chosen or _measured(minutes, *trial())


def _measured(minutes: float, setup: Setup, evaluate: Callable[[Pulse], Record] | None) -> int:
    began_s = time.perf_counter()
    steps_s = [_seconds(setup, step) for step in _trial_steps(began_s, setup)][_WARM_UPS:]
    evaluation_s = 0.0
    if evaluate is not None:
        start_s = time.perf_counter()
        evaluate(Pulse())
        evaluation_s = time.perf_counter() - start_s
    step_s = sorted(steps_s)[len(steps_s) // 2]
    left_s = 60.0 * minutes - (time.perf_counter() - began_s) - _EVALUATIONS * evaluation_s
    return int(setup.world.on_rank0(lambda: max(1, int(left_s / step_s))))


def _trial_steps(began_s: float, setup: Setup) -> Iterator[int]:
    """As many as fit in a few seconds on rank 0, but at least a few."""
    for step in itertools.count():
        enough = step >= _WARM_UPS + _FEWEST and time.perf_counter() - began_s > _TRIAL_S
        if setup.world.on_rank0(lambda enough=enough: enough):  # type: ignore[misc]
            return
        yield step


def _seconds(setup: Setup, step: int) -> float:
    began_s = time.perf_counter()
    gradient = setup.step.gradient(_micro_batches(setup, step))
    setup.step.update(gradient, lr=0.0)()
    return time.perf_counter() - began_s


def _micro_batches(setup: Setup, step: int) -> Iterator[Any]:
    setup.step.model.train()
    for index in setup.batches.plan.share(setup.world.rank, setup.world.size):
        torch.manual_seed(mix(setup.seed, step, index))
        yield setup.batches.micro_batch(step, index)


def say_how_long(records: Records, folder: RunFolder, steps: int, steps_per_s: float) -> None:
    """Early in a long run, how long it will take."""
    if steps / steps_per_s > _LONG_S:
        how_long = duration(steps / steps_per_s)
        hint = " (for a shorter run: --minutes 2)" if folder.config.exists() else ""  # a script has no flags of ours
        records.say(f"time   about {how_long} for {steps:,} more steps{hint}")
