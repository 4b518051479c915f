"""Trainer: any nn.Module on any map-style Dataset, through the same loop and with the same promises as a GPT."""

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
from drumline.parallel import compare, join, make_strategy, pick_dtype, versions
from drumline.train.guard import GuardRules
from drumline.train.loop import FitResult, Loop
from drumline.train.step import Objective, Precision

Loss = Callable[[Any, Any], Tensor]


class Trainer:
    """Trains a model on a dataset, from where its run folder says it is, to the end.

    dataset: map-style; samples are (input, target) pairs, or dicts passed to the model by keyword.
    loss:    (prediction, target) -> mean over the samples, as torch's losses give it. None: the model's output is the
             loss, or a tuple that ends with it.
    lr:      step -> learning rate; None leaves the optimizer's own alone.
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
        **loop: Any,
    ) -> None:
        world = join(device=device, backend=backend, bitwise=bitwise)
        where = world.device
        model = model.to(where)
        batch = BatchConfig(
            batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            global_batch_size=global_batch_size,
        )
        plan = plan_batches(batch, default_batch_size=batch_size, world_size=world.size)
        self.loop = Loop(
            folder=RunFolder(Path(run_dir)),
            model=model,
            optimizer=optimizer,
            batches=DatasetBatches(dataset, plan, seed=seed),
            objective=sample_objective(loss),
            precision=Precision.of(where, pick_dtype(dtype, where)),
            world=world,
            strategy=make_strategy(model, plan, world, bitwise=bitwise),
            seed=seed,
            lr=lr,
            grad_clip=grad_clip,
            retention=Retention(last=keep_checkpoints),
            guard_rules=GuardRules(on_nonfinite=on_nonfinite, max_nonfinite=max_nonfinite),
            **loop,
        )
        compare(world, {**versions(), **self.loop.facts})

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
        """Train to the end; `save_every` counts epochs if the length is given in epochs, else steps."""
        if (epochs is None) == (total_steps is None):
            raise ConfigError(f"epochs is {epochs} and total_steps is {total_steps}", fix="give one of the two")
        batches = self.loop.batches
        unit = Fraction(1) if epochs is None else Fraction(batches.items, batches.plan.sequences)
        last = math.ceil(Fraction(total_steps if epochs is None else epochs) * unit)  # type: ignore[arg-type]
        if last < 1:
            raise ConfigError(f"a run of {last} steps does nothing", fix="give epochs or total_steps a value above 0")
        world, folder = self.loop.world, self.loop.folder
        with ExitStack() as held:
            world.on_main(lambda: held.enter_context(folder.hold()))
            return self.loop.run(
                total_steps=last,
                log_every=log_every,
                save_every=(save_every or last) * unit,
                eval_every=eval_every or last,
                evaluate=evaluate,
            )


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
    """Samples of any map-style Dataset, collated as torch's DataLoader does."""

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], plan: BatchPlan, *, seed: int) -> None:
        self.plan = plan
        self.items = len(dataset)  # type: ignore[arg-type]
        self.weight = 1
        self._dataset, self._seed = dataset, seed
        if self.items < 1:
            raise DataError("the dataset has no samples", fix="give Trainer a dataset whose len() is 1 or more")

    def micro_batch(self, step: int, index: int) -> Any:
        return default_collate([self._dataset[i] for i in visits(self, self._seed, step, index).tolist()])

    def names(self, step: int, index: int | None = None) -> list[str]:
        return [f"sample {i}" for i in visits(self, self._seed, step, index).tolist()]
