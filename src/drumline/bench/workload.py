"""A preset's training step on random tokens, whole and in parts: what `drumline bench` times.

Model, optimizer, strategy, batches and step are those of a real run; only the tokens are random. A part is timed by
the difference it makes: data alone, data and forward, and so on up to the whole step, interleaved, so that background
load affects all of them equally. On a GPU, where CUDA graphs capture forward and backward together, forward alone runs
without a graph, so its time is overestimated.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drumline.bench.ceilings import seconds, start_together
from drumline.config import TrainConfig
from drumline.data import BatchPlan, TokenBatches, TokenFile
from drumline.kernels import WARM_UPS, RecordedBackward, with_graphs, with_kernels
from drumline.model import build_model, flops_per_token, token_objective
from drumline.optim import make_optimizer
from drumline.parallel import Plain, World, allow_tf32, make_strategy, pick_dtype
from drumline.train import Backward, Precision, Step, to_device

PARTS = ("data", "forward", "backward", "gradient_wait", "optimizer")
_TURNS, _MOST_STEPS = 5, 200
_TOKENS = 1 << 20
_LR = 1e-6
"""Too low to change the weights: a non-finite loss would skip the optimizer update, and the time it takes."""


class Workload:
    """The training step of a resolved config, ready to run on this rank."""

    def __init__(self, config: TrainConfig, plan: BatchPlan, world: World) -> None:
        """Involves no collectives, so that a rank that runs out of memory can report it."""
        allow_tf32()
        assert config.data.vocab_size and config.model.context
        self.config, self.plan, self.world = config, plan, world
        self.precision = Precision.of(world.device, pick_dtype(config.run.dtype, world.device))
        torch.manual_seed(config.run.seed)
        with world.device:  # initialize on the device: a large model's weights take a CPU many seconds
            self.model = build_model(with_kernels(config, world.device), vocab_size=config.data.vocab_size).train()
        if config.run.compile:
            torch.compiler.reset()  # compiled code of other models or batch sizes must not count against this one
            self.model.compile()
        self._batches = _made_up_batches(config, plan)
        optimizer, strategy = make_optimizer(self.model, config.optim), Plain(self.model)
        backward = Backward(token_objective, self.precision, self.tokens_per_step)
        backward = with_graphs(backward, self.model, strategy)
        grad_clip = config.optim.grad_clip or 0.0
        self._alone = Step(self.model, optimizer, strategy, backward, self.precision, grad_clip)
        self._together = self._alone
        self._steps = itertools.count()

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def tokens_per_step(self) -> int:
        return self.plan.sequences * self._batches.tokens_per_item

    @property
    def flops_per_token(self) -> int:
        return int(flops_per_token(self.model, context=self._batches.tokens_per_item))

    def join_ranks(self) -> None:
        """From here on, a step is a collective."""
        if self.world.is_group:
            strategy = make_strategy(self.model, self.plan, self.world, bitwise=False)
            backward = replace(self._alone.backward, scale=strategy.scale)
            self._together = replace(self._alone, strategy=strategy, backward=backward)

    def warm_up(self) -> None:
        """Warmup steps."""
        for _ in range(WARM_UPS + 1 if isinstance(self._together.backward, RecordedBackward) else 1):
            self.step()

    def data(self) -> None:
        for batch in self._micro_batches():
            to_device(batch, self.precision.device)

    def forward(self) -> None:
        """Data only."""
        for batch in self._micro_batches():
            self._alone.backward.loss(self.model, to_device(batch, self.precision.device))

    def backward(self) -> None:
        """Data and forward."""
        self._alone.gradient(self._micro_batches())

    def alone(self) -> None:
        """A whole step without synchronization between ranks."""
        self._alone.update(self._alone.gradient(self._micro_batches()), lr=_LR)()

    def step(self) -> None:
        self._together.update(self._together.gradient(self._micro_batches()), lr=_LR)()

    def _micro_batches(self) -> Iterator[Any]:
        step = next(self._steps)
        for index in self.plan.share(self.world.rank, self.world.size):
            yield self._batches.micro_batch(step, index)


def _made_up_batches(config: TrainConfig, plan: BatchPlan) -> TokenBatches:
    assert config.data.vocab_size and config.model.context
    draw = np.random.default_rng(config.run.seed)
    drawn = draw.integers(config.data.vocab_size, size=max(_TOKENS, config.model.context) + 1, dtype=np.uint32)
    tokens = TokenFile(path=Path("random.bin"), tokens=drawn)
    return TokenBatches(tokens, plan, context=config.model.context, seed=config.run.seed)


def step_seconds(workload: Workload, *, budget_s: float) -> float:
    """The median time of a step, over as many steps as the budget allows."""
    world = workload.world
    workload.warm_up()
    once_s = slowest(world, seconds(workload.step, world.device, repeats=1))
    steps = max(1, min(_MOST_STEPS, int(budget_s / once_s)))
    turns = min(3, steps)
    times = [seconds(workload.step, world.device, repeats=steps // turns) for _ in range(turns)]
    return slowest(world, statistics.median(times))


def part_seconds(workload: Workload, *, steps: int | None, budget_s: float) -> dict[str, float]:
    """Seconds by part; they add up to the median step.

    steps: how many of each kind to time; None: as many as the budget allows
    """
    kinds: dict[str, Callable[[], None]] = {
        "data": workload.data,
        "forward": workload.forward,
        "backward": workload.backward,
        **({"alone": workload.alone} if workload.world.is_group else {}),
        "step": workload.step,
    }
    world = workload.world
    workload.warm_up()
    for kind in kinds.values():  # one-time setup
        kind()
    once_s = slowest(world, sum(seconds(kind, world.device, repeats=1) for kind in kinds.values()))
    wanted = steps or max(2, min(_MOST_STEPS, int(budget_s / once_s)))
    turns = min(_TURNS, wanted)
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, kind in kinds.items():
            start_together(world)
            took[name].append(seconds(kind, world.device, repeats=-(-wanted // turns)))
    of_all = world.gather({name: statistics.median(times) for name, times in took.items()})
    medians = {name: statistics.mean(each[name] for each in of_all) for name in kinds}
    return _differences(medians)


def _differences(medians: dict[str, float]) -> dict[str, float]:
    """Turn cumulative times into the times of the parts.

    Noise may make a shorter prefix look longer than a longer one; no part is negative, and the parts add up to the
    whole step.
    """
    whole = medians["step"]
    without_ranks = medians.get("alone", whole)
    levels = [0.0, medians["data"], medians["forward"], medians["backward"], without_ranks]
    rising = list(itertools.accumulate((min(level, whole) for level in levels), max))
    data, forward, backward, optimizer = (after - before for before, after in itertools.pairwise(rising))
    seconds = {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer}
    seconds["gradient_wait"] = whole - rising[-1]
    return {part: seconds[part] for part in PARTS}


def slowest(world: World, took_s: float) -> float:
    """The slowest rank's time, on every rank."""
    return float(max(world.gather(took_s)))
