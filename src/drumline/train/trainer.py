"""Trainer: any nn.Module on any map-style Dataset, with the same loop and guarantees as a GPT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from drumline.checkpoint import Retention
from drumline.config import Backend, BatchConfig, Device, Dtype, OnNonfinite
from drumline.data import BatchPlan, plan_batches, visits
from drumline.errors import ConfigError, DataError
from drumline.files import RunFolder
from drumline.parallel import join, make_strategy, pick_dtype, versions
from drumline.report import JsonlSink, Records
from drumline.train.assembly import assembled
from drumline.train.guard import GuardRules
from drumline.train.loop import FitResult
from drumline.train.setup import Intervals, Setup
from drumline.train.step import Backward, Objective, Precision, Step

Loss = Callable[[Any, Any], Tensor]


class Trainer:
    """Trains a model on a dataset, resuming from its run folder if the run exists.

    dataset: map-style; samples are (input, target) pairs, or dicts passed to the model as keyword arguments.
    loss:    (prediction, target) -> mean over the samples, as in torch. None: the model's output is the loss or a tuple
             that ends with it.
    lr:      step -> learning rate; None: leave the optimizer's own.
    snapshot_every: steps between in-memory snapshots; 0: none.
    facts:   what must not change when the run is resumed, besides what every run has.
    """

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset[Any] | Sequence[Any],
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss | None = None,
        batch_size: int = 32,
        gradient_accumulation_steps: int | None = None,
        global_batch_size: int | None = None,
        run_dir: str | Path = "runs/trainer",
        seed: int = 0,
        device: Device = "auto",
        dtype: Dtype = "float32",
        backend: Backend = "auto",
        bitwise: bool = False,
        lr: Callable[[int], float] | None = None,
        grad_clip: float = 0.0,
        keep_checkpoints: int = 3,
        on_nonfinite: OnNonfinite = "skip",
        max_nonfinite: int = 5,
        snapshot_every: int = 0,
        resume_from: str = "auto",
        allow_change: Sequence[str] = (),
        facts: dict[str, Any] | None = None,
    ) -> None:
        world = join(device=device, backend=backend, bitwise=bitwise)
        batch = BatchConfig(
            batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            global_batch_size=global_batch_size,
        )
        plan = plan_batches(batch, default_batch_size=batch_size, world_size=world.size)
        model = model.to(world.device)
        strategy = make_strategy(model, plan, world, bitwise=bitwise)
        precision = Precision.of(world.device, pick_dtype(dtype, world.device))
        backward = Backward(sample_objective(loss), precision, plan.sequences, strategy.scale)
        self.snapshot_every = snapshot_every
        self.setup = Setup(
            folder=RunFolder(Path(run_dir)),
            world=world,
            step=Step(model, optimizer, strategy, backward, precision, grad_clip),
            batches=DatasetBatches(dataset, plan, seed=seed),
            seed=seed,
            lr=lr,
            resume_from=resume_from,
            allow_change=allow_change,
            retention=Retention(last=keep_checkpoints),
            guard_rules=GuardRules(on_nonfinite=on_nonfinite, max_nonfinite=max_nonfinite),
            facts=facts or {},
        )
        if world.size > 1:
            from drumline.parallel import compare

            compare(world, {**versions(), **self.setup.all_facts()})

    def fit(
        self,
        *,
        epochs: float | None = None,
        total_steps: int | None = None,
        save_every: int | None = None,
        log_every: int = 10,
        eval_every: int | None = None,
        evaluate: Callable[[], dict[str, Any]] | None = None,
    ) -> FitResult:
        """Train to the end; `save_every` is in epochs if the length is given in epochs, else in steps."""
        if (epochs is None) == (total_steps is None):
            raise ConfigError(f"epochs is {epochs} and total_steps is {total_steps}", fix="give one of the two")
        batches, world, folder = self.setup.batches, self.setup.world, self.setup.folder
        unit = Fraction(1) if epochs is None else Fraction(batches.items, batches.plan.sequences)
        last = math.ceil(Fraction(total_steps if epochs is None else epochs) * unit)  # type: ignore[arg-type]
        if last < 1:
            raise ConfigError(f"a run of {last} steps does nothing", fix="give epochs or total_steps a value above 0")
        intervals = Intervals(
            total_steps=last,
            log_every=log_every,
            eval_every=eval_every or last,
            save_every=(save_every or last) * unit,
            snapshot_every=self.snapshot_every,
        )
        with ExitStack() as open_parts:
            world.on_rank0(lambda: open_parts.enter_context(folder.hold()))
            evaluator = (lambda pulse: evaluate()) if evaluate else None
            records = Records([], log=None, silent=True)
            if world.is_rank0:
                records = Records([JsonlSink(folder.metrics)], log=folder.log)
            open_parts.callback(records.close)
            loop = open_parts.enter_context(assembled(self.setup, intervals, records, evaluate=evaluator))
            return loop.run()


def sample_objective(loss: Loss | None) -> Objective:
    """The summed loss of a micro-batch of samples."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        if loss is not None:
            inputs, targets = batch
            return loss(model(inputs), targets) * len(targets)
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        mean: Tensor = output[-1] if isinstance(output, tuple) else output
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return mean * len(first)

    return objective


class DatasetBatches:
    """Samples of any map-style Dataset, collated like torch's DataLoader does."""

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], plan: BatchPlan, *, seed: int) -> None:
        self.plan = plan
        self.items = len(dataset)  # type: ignore[arg-type]
        self.tokens_per_item = 1
        self._dataset, self._seed = dataset, seed
        if self.items < 1:
            raise DataError("the dataset has no samples", fix="use a dataset whose len() is 1 or more")

    def micro_batch(self, step: int, index: int) -> Any:
        return default_collate([self._dataset[i] for i in visits(self, self._seed, step, index).tolist()])

    def names(self, step: int, index: int | None = None) -> list[str]:
        return [f"sample {i}" for i in visits(self, self._seed, step, index).tolist()]
