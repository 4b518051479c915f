"""Trainer: any nn.Module on any map-style Dataset, with the same loop and guarantees as a GPT."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from drumline.checkpoint import Retention, check_resume, check_same_run, checkpoint_paths, what_to_resume
from drumline.config import Backend, BatchConfig, Device, Dtype, OnNonfinite, ScaleLr
from drumline.data import BatchPlan, plan_batches
from drumline.errors import ConfigError
from drumline.files import RunFolder
from drumline.parallel import Pulse, World, make_strategy, own_pulse, pick_dtype
from drumline.report import Record, Records, Sink
from drumline.train import Backward, FitResult, GuardRules, Intervals, Precision, Setup, Step, StepResult, assembled
from drumline.trainer.callbacks import Callback, Moments
from drumline.trainer.console import check_sinks, ending, idle_settings, introduction, open_records, show_metrics
from drumline.trainer.objectives import Loss, check_batch, objective_of, usual_loss
from drumline.trainer.ranks import compare_ranks, joined
from drumline.trainer.rates import Rates, ScheduleUnit, scale_factor
from drumline.trainer.resumed_batch import divided, stored_batch
from drumline.trainer.sameness import ACCUMULATED, choose_folder, fingerprint, traits, write_about
from drumline.trainer.samples import Collate, DatasetBatches, Samples, Source, source_of
from drumline.trainer.scripts import for_scripts, made_by_scripts
from drumline.trainer.snapshot_file import SnapshotFile
from drumline.trainer.validation import Metric, validate

_LOG_EVERY = 10


@made_by_scripts
@dataclass(eq=False, repr=False)
class Trainer:
    """Trains a model on a dataset, in its run folder, resuming if the run exists."""

    model: nn.Module
    dataset: Samples | DataLoader[Any]
    """Map-style, with (input, target) pairs, or dicts that are passed to the model as keyword arguments; or a
    DataLoader, whose dataset, batch_size, collate_fn and workers are used. Its sampler is replaced: ranks share one
    order, a new one in each epoch, or that of the dataset with shuffle=False."""
    optimizer: torch.optim.Optimizer
    gpu_or_snapshot: int | str | Path | None = None
    """The number of the GPU to use, which under a launcher is the local rank; or the path of a .pt file that always has
    the newest weights and epoch, and that a new run starts from if it exists."""
    save_every: int | None = None
    """Default of `fit`."""
    _: KW_ONLY
    loss: Loss | None = None
    """(prediction, target) -> mean over the samples, as in torch. None: the model's output has the loss; if the model
    takes only the input, cross entropy for integer targets and squared error for others."""
    batch_size: int | None = None
    """Samples per rank and micro-batch. Default: the DataLoader's, or 32."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per rank and step. Default: 1."""
    global_batch_size: int | None = None
    """Samples per step over all ranks, instead of gradient_accumulation_steps."""
    shuffle: bool | None = None
    """Default: as the DataLoader does, or True."""
    collate_fn: Collate | None = None
    num_workers: int | None = None
    """Processes that read samples ahead. Default: the DataLoader's, or 0."""
    valid_dataset: Samples | DataLoader[Any] | None = None
    """Evaluated during training."""
    metrics: Mapping[str, Metric] | None = None
    """By name: (prediction, target) -> mean over the samples; shown with the validation loss."""
    lr: Callable[[int], float] | None = None
    """step -> learning rate. Default: the optimizer's own."""
    scheduler: LRScheduler | None = None
    """A scheduler of torch, instead of lr."""
    schedule_unit: ScheduleUnit = "step"
    """Whether the scheduler is stepped once per step or once per epoch."""
    scale_lr: ScaleLr = "none"
    """Multiply the learning rates by global batch size / base_batch_size (linear), or its square root (sqrt)."""
    base_batch_size: int | None = None
    """Global batch size that the learning rates were tuned for, with scale_lr."""
    callbacks: Sequence[Callback] = ()
    sinks: Sequence[Sink | str] = ()
    """Where records go besides the run folder: "tensorboard", "wandb", or an object with write(record) and close()."""
    run_dir: str | Path | None = None
    """Run folder. Default: runs/SCRIPT, runs/SCRIPT-2, ...: the first that is free, or has this run with steps left."""
    resume: bool = True
    """False: always a new run."""
    resume_from: str = "auto"
    """auto: the run's newest valid checkpoint; or a step, or a path: checkpoint, run folder, .pt file."""
    seed: int = 0
    device: Device = "auto"
    dtype: Dtype = "float32"
    backend: Backend = "auto"
    bitwise: bool = False
    """Bitwise identical results on any number of ranks."""
    shard: int | Literal["none", "full", "host"] = "none"
    """Spread weights, gradients and optimizer state over all ranks (full), those of each host, or groups of so many.
    Such a model is called on all ranks together: on one alone, it waits for the others. Its state_dict() has the part
    of one rank; `drumline checkpoint export` writes whole weights."""
    shard_units: str | Sequence[str] = ()
    """Names of the modules whose weights are gathered one after another. Default: the largest repeated block."""
    grad_clip: float = 0.0
    """Maximum gradient norm; 0: no clipping."""
    keep_checkpoints: int = 3
    on_nonfinite: OnNonfinite = "skip"
    max_nonfinite: int = 5
    snapshot_every: int = 0
    """Steps between in-memory snapshots; 0: none."""
    snapshot_copies: int = 1
    """With shards on several hosts: how many of them have each shard of a snapshot."""
    allow_change: Sequence[str] = ()
    """Facts that may differ from those of the run that is resumed."""
    facts: dict[str, Any] | None = None
    """What must not change when the run is resumed, besides what every run has."""

    def __post_init__(self) -> None:
        check_sinks(self.sinks)
        self._source = source_of(
            self.dataset,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
        )
        self._valid = None if self.valid_dataset is None else self._held_out(self.valid_dataset)
        world = joined(self.gpu_or_snapshot, device=self.device, backend=self.backend, bitwise=self.bitwise)
        data = fingerprint(self._source)
        batch = self._source.read([0])
        world.on_all_ranks(lambda: check_batch(self.model, batch, has_loss=self.loss is not None))
        self.loss = self.loss or usual_loss(self.model, batch)
        self._moments = Moments(self, [*self.callbacks, *self._snapshot_files()])
        self._about = self._what_it_is(data)
        stored = world.on_rank0(lambda: self._stored_batch(world))
        batches, self._rates = world.on_all_ranks(lambda: self._planned(world, stored))
        self.setup = Setup(
            folder=RunFolder(Path(self.run_dir or "")),
            world=world,
            step=self._step(batches.plan, world),
            batches=batches,
            seed=self.seed,
            lr=self._rates,
            # Other ranks may have had to divide a step into other micro-batches; the sum is the same.
            allow_change=[*self.allow_change, *(["batch_size"] if stored and not self.bitwise else [])],
            retention=Retention(last=self.keep_checkpoints),
            guard_rules=GuardRules(on_nonfinite=self.on_nonfinite, max_nonfinite=self.max_nonfinite),
            facts=self.facts or {},
            stepped=self._stepped,
        )
        self._first_time = True
        compare_ranks(world, self.setup.all_facts(), data=data)

    def _what_it_is(self, data: str) -> dict[str, Any]:
        """By this a script that is started again knows its run, on any number of ranks."""
        asked = {"batch_size": self._source.batch_size, ACCUMULATED: self.gradient_accumulation_steps or 1}
        return {**traits(self.model, self.optimizer, data), **asked}

    def _new_plan(self, world: World) -> BatchPlan:
        batch = BatchConfig(
            batch_size=self._source.batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            global_batch_size=self.global_batch_size,
        )
        return plan_batches(batch, default_batch_size=1, world_size=world.size)

    def _stored_batch(self, world: World) -> int | None:
        """The samples per step of the run that this goes on with, unless the script says how many."""
        says = self.global_batch_size is not None or "global_batch_size" in self.allow_change
        if says or not self.resume or self.resume_from != "auto":
            return None
        facts = {"seed": self.seed, "items_per_epoch": len(self._source), **(self.facts or {})}
        return stored_batch(
            self.run_dir, {**facts, "global_batch_size": self._new_plan(world).sequences, **self._about}
        )

    def _planned(self, world: World, stored: int | None) -> tuple[DatasetBatches, Rates | None]:
        if stored is None:
            plan = self._new_plan(world)
        else:
            plan = divided(stored, self._source.batch_size, ranks=world.size, bitwise=self.bitwise)
        if self.shard != "none":
            from drumline.sharding import dealt

            plan = dealt(plan, bitwise=self.bitwise)
        batches = DatasetBatches(self._source, plan, seed=self.seed, share=plan.share(world.rank, world.size))
        factor = scale_factor(self.scale_lr, self.base_batch_size, global_batch_size=plan.sequences)
        if self.lr is None and self.scheduler is None and factor == 1.0:
            return batches, None  # the script may change them itself
        steps_per_epoch = Fraction(batches.items, plan.sequences)
        return batches, Rates(
            self.optimizer,
            function=self.lr,
            scheduler=self.scheduler,
            steps_per_unit=steps_per_epoch if self.schedule_unit == "epoch" else Fraction(1),
            factor=factor,
        )

    @property
    def folder(self) -> RunFolder:
        """The run folder; without run_dir, `fit` chooses it."""
        return self.setup.folder

    @property
    def rank(self) -> int:
        """Of this process; the run is printed and saved by rank 0."""
        return self.setup.world.rank

    @for_scripts
    def train(self, max_epochs: float) -> FitResult:
        """Train to the end of this epoch, saving every `save_every` epochs."""
        return self.fit(epochs=max_epochs)

    @for_scripts
    def fit(
        self,
        *,
        epochs: float | None = None,
        total_steps: int | None = None,
        save_every: int | None = None,
        log_every: int | None = None,
        eval_every: int | None = None,
        evaluate: Callable[[], dict[str, Any]] | None = None,
    ) -> FitResult:
        """Train to the end.

        save_every: in epochs if the length is given in epochs, else in steps. Default: at the end
        log_every:  in steps. Default: 10, or an epoch if that is shorter and the length is in epochs
        eval_every: in steps. Default: an epoch if the length is in epochs, else a tenth of the run
        evaluate:   returns more numbers to record at each evaluation
        """
        batches, world = self.setup.batches, self.setup.world
        unit = Fraction(1) if epochs is None else Fraction(batches.items, batches.plan.sequences)
        last = world.on_all_ranks(lambda: _length(epochs, total_steps, unit))
        every = {"save_every": save_every, "log_every": log_every, "eval_every": eval_every}
        world.on_all_ranks(lambda: _check_intervals({**every, "Trainer's save_every": self.save_every}))
        each_epoch = max(unit, Fraction(1))
        intervals = Intervals(
            total_steps=last,
            log_every=log_every or (_LOG_EVERY if epochs is None else min(Fraction(_LOG_EVERY), each_epoch)),
            eval_every=eval_every or (max(1, last // 10) if epochs is None else each_epoch),
            save_every=(save_every or self.save_every or last) * unit,
            snapshot_every=self.snapshot_every,
            snapshot_copies=self.snapshot_copies,
        )
        self._settle(last)
        with ExitStack() as open_parts:
            world.on_rank0(lambda: open_parts.enter_context(self.folder.hold()))
            records = world.on_all_ranks(lambda: self._open_records(epochs))
            open_parts.callback(records.close)
            assert isinstance(batches, DatasetBatches)
            open_parts.callback(batches.close)
            records.say(
                introduction(self.setup, self._source, self._valid, self.loss, rates=self._rates, total_steps=last)
            )
            for note in idle_settings(self.shard, self.shard_units, snapshot_copies=self.snapshot_copies):
                records.say(note)
            evaluator = self._evaluator(evaluate, records)
            loop = open_parts.enter_context(assembled(self.setup, intervals, records, evaluate=evaluator))
            self._loop = loop
            result = loop.run()
            self._moments.saved(loop.saver.saved_step)
            self._moments.ended(result)
            ending(records, self.folder, result, did_nothing=math.isnan(result.loss))
            return result

    def _held_out(self, data: Samples | DataLoader[Any]) -> Source:
        size = self._source.batch_size if not isinstance(data, DataLoader) else None
        return source_of(data, batch_size=size, collate_fn=self.collate_fn, num_workers=self.num_workers)

    def _snapshot_files(self) -> list[Callback]:
        path = self.gpu_or_snapshot
        return [SnapshotFile(Path(path))] if isinstance(path, str | Path) else []

    def _step(self, plan: BatchPlan, world: World) -> Step:
        precision = Precision.of(world.device, pick_dtype(self.dtype, world.device))
        if self.shard != "none":
            from drumline.sharding import script_step

            return script_step(
                self.model,
                self.optimizer,
                objective_of(self.loss),
                plan,
                world,
                shard=self.shard,
                units=self.shard_units,
                precision=precision,
                bitwise=self.bitwise,
                grad_clip=self.grad_clip,
            )
        model = self.model.to(world.device)
        strategy = make_strategy(model, plan, world, bitwise=self.bitwise)
        backward = Backward(objective_of(self.loss), precision, plan.sequences, strategy.scale)
        return Step(model, self.optimizer, strategy, backward, precision, self.grad_clip)

    def _settle(self, total_steps: int) -> None:
        """Choose the run folder, and what to resume from."""
        setup, world = self.setup, self.setup.world
        about = {**setup.all_facts(), **self._about}

        def chosen() -> list[str]:
            folder = setup.folder
            if self._first_time and self.run_dir is None:
                folder = choose_folder(about, total_steps=total_steps, resume=self.resume)
            has_begun = bool(checkpoint_paths(folder.checkpoints))
            if self._first_time and not self.resume and has_begun:
                raise ConfigError(
                    f"{folder.path} has a run already", fix="choose another run_dir, or drop resume=False"
                )
            resume_from = self.resume_from if self._first_time else "auto"
            snapshot = self.gpu_or_snapshot
            if resume_from == "auto" and isinstance(snapshot, str | Path) and not has_begun and self.resume:
                resume_from = str(snapshot) if Path(snapshot).exists() else "auto"
            check_resume(resume_from, folder)
            if resume_from == "auto":
                check_same_run(folder, setup.all_facts(), setup.allow_change)
            return [str(folder.path), resume_from]

        path, resume_from = world.on_rank0(chosen)
        self._first_time = False
        setup.folder = RunFolder(Path(path))
        again = own_pulse().started_again
        setup.resume_from = what_to_resume(resume_from, setup.folder, world, started_again=again)

    def _open_records(self, epochs: float | None) -> Records:
        if not self.setup.world.is_rank0:
            return Records([], log=None, silent=True)
        about = {**self.setup.all_facts(), **self._about}
        records = open_records(self.folder, self.sinks, epochs=epochs, about=about)
        records.attempt(str(self.folder.trainer), lambda: write_about(self.folder, about))
        return records

    def _evaluator(
        self, more: Callable[[], dict[str, Any]] | None, records: Records
    ) -> Callable[[Pulse], Record] | None:
        valid = self._valid
        if valid is None and more is None:
            return None

        def evaluate(pulse: Pulse) -> Record:
            record: Record = {}
            if valid is not None:
                record = validate(
                    self.model,
                    valid,
                    loss=self.loss,
                    metrics=self.metrics or {},
                    precision=self.setup.step.precision,
                    world=self.setup.world,
                    pulse=pulse,
                )
            record |= more() if more is not None else {}
            show_metrics(records.formats, record)
            self._moments.evaluated(record)
            return record

        return evaluate

    def _stepped(self, step: int, result: StepResult) -> None:
        self._moments.stepped(step, result)
        self._moments.saved(self._loop.saver.saved_step)


def _length(epochs: float | None, total_steps: int | None, unit: Fraction) -> int:
    """In steps; unit: steps per epoch, if the length is in epochs."""
    if (epochs is None) == (total_steps is None):
        raise ConfigError(f"epochs is {epochs} and total_steps is {total_steps}", fix="give one of the two")
    last = math.ceil(Fraction(epochs if epochs is not None else total_steps or 0) * unit)
    if last < 1:
        raise ConfigError(f"a run of {last} steps does nothing", fix="give epochs or total_steps a value above 0")
    return last


def _check_intervals(every: Mapping[str, int | None]) -> None:
    for name, value in every.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", fix="give a number above 0, or leave it out for the default")
