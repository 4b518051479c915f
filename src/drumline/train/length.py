"""The length of a run: in steps, from --epochs or --minutes, and in time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from drumline.config import RunConfig, TrainConfig
from drumline.data import Batches, mix
from drumline.files import RunFolder, stored_config
from drumline.parallel import Pulse, World
from drumline.report import Record, Records
from drumline.train.setup import Setup
from drumline.units import duration

Evaluator = Callable[..., Callable[[Pulse], Record] | None]
"""Makes the evaluation of a config and a setup."""
_TRIAL_S, _WARM_UPS, _FEWEST = 4.0, 2, 3
_TRIAL_SHARE = 0.1
"""Of the whole time: after this, without the first step, the trial ends, however few steps it has seen."""
_EVALUATIONS, _EVALUATION_SHARE = 11, 0.1
"""One per tenth of the run, and about as much again for what happens at its end; of the whole time for all of them."""
_LONG_S = 60.0


def steps_in_epochs(config: TrainConfig, batches: Batches) -> int:
    assert config.batch.epochs is not None
    return math.ceil(config.batch.epochs * batches.items / batches.plan.sequences)


def steps_in_minutes(
    config: TrainConfig, folder: RunFolder, world: World, trial: Callable[[], Setup], evaluator: Evaluator
) -> tuple[TrainConfig, int]:
    """The steps that this machine can do in that time, and the config with evaluations that leave room for them.

    A resumed run keeps what was chosen at its start.

    trial: a setup to measure with; its weights change, so it is not the one to train
    """
    before = world.on_rank0(lambda: _chosen_before(folder))
    steps, windows = before or _measured(config, trial(), evaluator)
    if before and config.run.eval_windows != RunConfig().eval_windows:
        windows = config.run.eval_windows  # asked for, and may change
    return replace(config, run=replace(config.run, eval_windows=windows)), steps


def _chosen_before(folder: RunFolder) -> tuple[int, int] | None:
    """Steps and validation sequences per evaluation of a run that exists."""
    steps = folder.read_status().get("total_steps")
    stored = stored_config(folder) if steps else None
    return (steps, stored.run.eval_windows) if steps and stored else None


def _measured(config: TrainConfig, setup: Setup, evaluator: Evaluator) -> tuple[int, int]:
    """The number of steps, and of validation sequences per evaluation."""
    assert config.batch.minutes is not None and config.batch.batch_size is not None
    began_s, budget_s = time.perf_counter(), 60.0 * config.batch.minutes
    if setup.initialize:
        setup.initialize()
    steps_s: list[float] = []
    while not setup.world.on_rank0(lambda: _is_enough(steps_s, budget_s)):
        steps_s.append(_seconds(lambda: _train(setup, len(steps_s))))
    few = config.batch.batch_size * setup.world.size  # one batch on each rank
    plain = replace(config.run, eval_windows=few, eval_tasks=None)  # tasks take the same time for any number of windows
    evaluate = evaluator(replace(config, run=plain), setup=setup)
    few_s = _seconds(lambda: evaluate(Pulse())) if evaluate else 0.0
    return setup.world.on_rank0(
        lambda: _fitting(
            budget_s,
            spent_s=time.perf_counter() - began_s,
            steps_s=steps_s,
            window_s=few_s / few,
            windows=(few, config.run.eval_windows),
        )
    )


def _fitting(
    budget_s: float, *, spent_s: float, steps_s: list[float], window_s: float, windows: tuple[int, int]
) -> tuple[int, int]:
    """The steps, and validation sequences per evaluation, that fit into the time that the trial has left.

    windows: the fewest and the most sequences. Neither evaluations nor the trial may use up the time for steps.
    """
    first = _WARM_UPS if len(steps_s) >= _WARM_UPS + _FEWEST else 1
    steady = sorted(steps_s[first:])
    most_s = _EVALUATION_SHARE * budget_s
    affordable = int(most_s / (_EVALUATIONS * window_s)) if window_s else windows[1]
    chosen = min(windows[1], max(windows[0], affordable))
    left_s = budget_s - min(spent_s, budget_s / 2) - min(most_s, _EVALUATIONS * chosen * window_s)
    return max(1, int(left_s / steady[(len(steady) - 1) // 2])), chosen


def _is_enough(steps_s: list[float], budget_s: float) -> bool:
    """Whether the trial has seen steps for a few seconds after the first ones; a slow one ends earlier."""
    steady, share_s = steps_s[_WARM_UPS:], _TRIAL_SHARE * budget_s
    return sum(steps_s[1:]) > share_s or (len(steady) >= _FEWEST and sum(steady) > min(_TRIAL_S, share_s))


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _train(setup: Setup, step: int) -> None:
    gradient = setup.step.gradient(_micro_batches(setup, step))
    setup.step.update(gradient, lr=0.0)()


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
