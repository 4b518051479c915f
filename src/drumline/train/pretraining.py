"""From a TrainConfig to a finished run: tokenize the text, build the model, train, and show the results."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import nn

from drumline.checkpoint import Retention, check_resume, what_to_resume
from drumline.config import OPTIMIZERS, TrainConfig, preset, resolved, to_toml
from drumline.data import Data, Progress, ProgressCallback, TokenBatches, is_tokens, mix, open_data, plan_batches
from drumline.errors import EXIT_STOPPED
from drumline.files import RunFolder, choose_folder, replace_text
from drumline.lazy import room
from drumline.model import build_model, token_objective
from drumline.optim import learning_rate, make_optimizer, scaled
from drumline.parallel import Pulse, World, allow_tf32, join, leave, make_strategy, own_pulse, pick_dtype
from drumline.report import JsonlSink, Record, Records, Sparing
from drumline.train.assembly import assembled
from drumline.train.evaluation import evaluate
from drumline.train.guard import GuardRules
from drumline.train.loop import FitResult
from drumline.train.setup import Intervals, Setup
from drumline.train.step import Backward, Precision, Step
from drumline.train.summary import conclude, introduction

_LARGE = 1 << 24
"""Units of all layers for a micro-batch, and their weights: below, a run takes no more than one or two gigabytes."""
Showing = Callable[[], AbstractContextManager[ProgressCallback | None]]
"""Shows the progress of tokenizing for as long as that takes."""


def pretrain(
    config: TrainConfig, *, progress: ProgressCallback | None = None, showing: Showing | None = None
) -> FitResult:
    """Train according to the config, in its run folder, resuming if the run exists; all ranks call this."""
    own_pulse().promise_an_ending()
    world = join(device=config.run.device, backend=config.ranks.backend, bitwise=config.ranks.bitwise)
    try:
        return _pretrain(config, world, showing or (lambda: nullcontext(progress)))
    except (RuntimeError, MemoryError) as error:
        room("bench").explain_memory(error, config, world)
        raise
    finally:
        leave()


def train_here(config: TrainConfig) -> int:
    """Train in this process, alone or as one of the ranks; returns the exit code."""
    return 0 if pretrain(config, showing=_preparing).state == "finished" else EXIT_STOPPED


@contextmanager
def _preparing() -> Iterator[ProgressCallback]:
    """Shows the progress of tokenizing if that takes more than a moment."""
    shown: list[ProgressCallback] = []

    def open_bars(progress: Progress) -> None:
        from drumline.report import preparing

        shown.append(open_parts.enter_context(preparing()))
        shown[0](progress)

    with ExitStack() as open_parts:
        opens = Sparing(open_bars)
        yield lambda progress: shown[0](progress) if shown else opens(progress)


def _pretrain(config: TrainConfig, world: World, showing: Showing) -> FitResult:
    config = world.on_all_ranks(lambda: _checked(config, world.device))
    folder = RunFolder(Path(world.on_rank0(lambda: str(choose_folder(config).path))))
    if config.run.checkpoint_store or "://" in config.run.resume_from:
        config = room("stores").fetched(config, folder, world)
    world.on_rank0(lambda: check_resume(config.run.resume_from, folder))
    stored = _stored(folder, world)
    config = world.on_all_ranks(lambda: _settled(config, folder, stored, world))
    _check_memory(config, world)
    with showing() as progress:
        data = _open_data(config, folder, world, progress)
    with ExitStack() as open_parts:
        world.on_rank0(lambda: open_parts.enter_context(folder.hold()))
        own_pulse().tell_run_dir(folder.path)
        config, total_steps = _with_length(config, folder, data, world)
        records = world.on_all_ranks(lambda: _open_records(config, folder, data, world))
        open_parts.callback(records.close)
        if config.model.init_from is not None:
            open_parts.enter_context(room("huggingface").started_from(config, folder, data, world, records.say))
        setup = set_up(config, folder, data, world, total_steps=total_steps, goes_on=stored is not None)
        intervals = _intervals(config, total_steps=total_steps)
        if data.tokenizer is not None and config.ranks.shard != "none":
            room("generate").write_together(config, data, setup, records)
        elif data.tokenizer is not None and world.is_rank0:
            setup.evaluated = Sparing(lambda step: room("generate").write_sample(config, data, setup, records, step))
        records.say("\n".join(introduction(config, data, setup, total_steps=total_steps)))
        if data.mix is not None:
            data.mix.follow(setup, records, total_steps=total_steps)
        with assembled(setup, intervals, records, evaluate=_evaluator(config, data, setup)) as loop:
            if "DRUMLINE_AGAIN" in os.environ:
                room("reasons").end_early(loop)
            if config.run.checkpoint_store and world.is_rank0:
                open_parts.enter_context(room("stores").uploads_of_run(config.run.checkpoint_store, loop))
            result = loop.run()
        return conclude(config, data, setup, records, result)


def _open_data(config: TrainConfig, folder: RunFolder, world: World, progress: ProgressCallback | None) -> Data:
    if world.size == 1:
        return open_data(config, run=folder, progress=progress)
    from drumline.train.ranks import open_in_turn

    return open_in_turn(config, folder, world, progress)


def _checked(config: TrainConfig, device: torch.device) -> TrainConfig:
    """The resolved config; refuses what cannot work before any text is tokenized."""
    if is_tokens(config.data.train_data_path) or config.data.stages:
        from drumline.data import with_token_facts

        config = with_token_facts(config)
    config = resolved(config)
    if config.model.model != "gpt" or config.optim.optimizer not in (None, *OPTIMIZERS) or config.run.fp8:
        from drumline.train.advice import check_choices

        check_choices(config, device)
    return config


def _stored(folder: RunFolder, world: World) -> TrainConfig | None:
    """The config that the run was started with, as rank 0 finds it: other hosts may not see the folder."""
    if not world.on_rank0(lambda: folder.config.exists() and folder.read_status().get("state") != "imported"):
        return None
    from drumline.config import from_settings
    from drumline.files import stored_settings

    return from_settings(world.on_rank0(lambda: stored_settings(folder)))


def _settled(config: TrainConfig, folder: RunFolder, stored: TrainConfig | None, world: World) -> TrainConfig:
    """The config with what only the run folder determines: the batch size of a step, and the folder itself."""
    batch = config.batch
    if stored is not None:
        from drumline.config import refuse_changes, with_stored_batch

        batch = with_stored_batch(batch, stored.batch)
    plan = plan_batches(batch, default_batch_size=preset(config.model.preset).batch_size, world_size=world.size)
    plan.share(world.rank, world.size)  # raises if there are more ranks than micro-batches
    size, sequences = plan.micro_batch_size, plan.sequences
    batch = replace(batch, batch_size=size, global_batch_size=sequences, gradient_accumulation_steps=None)
    settled = replace(config, batch=batch, run=replace(config.run, run_dir=str(folder.path)))
    if stored is not None:
        refuse_changes(settled, stored, run_dir=folder.path)
    return settled


def _check_memory(config: TrainConfig, world: World) -> None:
    """Refuse a batch that does not fit in memory; small ones always do."""
    model, batch_size = config.model, config.batch.batch_size
    assert model.n_layers and model.d_model and model.context and batch_size
    if model.n_layers * model.d_model * (batch_size * model.context + 12 * model.d_model) > _LARGE:
        room("bench").check_memory(config, world)


def _with_length(config: TrainConfig, folder: RunFolder, data: Data, world: World) -> tuple[TrainConfig, int]:
    """The number of steps, and the config with what depends on it."""
    if config.batch.total_steps is not None:
        return config, config.batch.total_steps
    from drumline.train.length import steps_in_epochs, steps_in_minutes

    if config.batch.minutes is None:
        return config, steps_in_epochs(config, world.on_all_ranks(lambda: _batches(config, data, total_steps=0)))
    trial = partial(set_up, config, folder, data, world, total_steps=1)
    return steps_in_minutes(config, folder, world, trial, partial(_evaluator, data=data))


def _open_records(config: TrainConfig, folder: RunFolder, data: Data, world: World) -> Records:
    """Rank 0 writes the run's files and prints; the other ranks are silent."""
    if not world.is_rank0:
        return Records([], log=None, silent=True)
    if data.samples:
        from drumline.data import check_samples

        check_samples(data, folder, config.run.allow_change)
    records = Records([JsonlSink(folder.metrics)], log=folder.log)
    if any((config.records.tensorboard, config.records.use_wandb, config.records.sink)) or config.batch.epochs:
        from drumline.train.advice import add_to

        add_to(records, config, folder)
    if config.run.eval_tasks:
        records.formats = room("evals").with_task_formats(records.formats)
    stored = to_toml(replace(config, run=replace(config.run, resume_from="auto", allow_change=())))
    if not folder.config.exists() and data.tokenizer is not None:  # a new run
        data.tokenizer.save(folder.tokenizer)
        room("chats").keep_style(data.train, folder) if data.train.targets is not None else None
    for path, text in ((folder.data, data.origin()), (folder.config, stored)):
        if not path.exists():  # a run that could not even start is not worth resuming
            replace_text(path, text)
        elif path == folder.config and path.read_text(encoding="utf-8") != text:
            records.attempt(str(path), lambda: replace_text(folder.config, stored))
    return records


def _batches(config: TrainConfig, data: Data, *, total_steps: int) -> TokenBatches:
    assert config.model.context is not None and config.batch.short_contexts is not None
    make: Callable[..., TokenBatches] = TokenBatches
    if any((data.train.packer, config.data.skip_list, data.mix, "://" in config.data.train_data_path)):
        from drumline.train.advice import other_batches

        make = other_batches(config, data, total_steps=total_steps)
    batches = make(
        data.train,
        plan_batches(config.batch, default_batch_size=1, world_size=1),
        context=config.model.context,
        seed=config.run.seed,
        document_mask=config.data.document_mask,
    )
    batches.short_steps = round(config.batch.short_contexts * total_steps)
    return batches


def set_up(
    config: TrainConfig, folder: RunFolder, data: Data, world: World, *, total_steps: int, goes_on: bool = False
) -> Setup:
    """goes_on: the weights will be restored, so they are initialized only if nothing valid is left

    Those of a sharded GPT are initialized later in any case, as no rank has all of them.
    """
    batches = world.on_all_ranks(lambda: _batches(config, data, total_steps=total_steps))
    make, initialize = partial(_model, config, data, world), None
    if config.model.model == "gpt" and (goes_on or config.ranks.shard != "none"):
        from drumline.model import uninitialized

        model, initialize = uninitialized(make, world.device, ranks=None if config.ranks.shard == "none" else world)
        if config.model.init_from is not None and goes_on:
            initialize = partial(room("huggingface").begin_again, config, folder, model, world)
    else:
        model = make()
    train_data = data.train.sha256 or f"{len(data.train)} tokens"
    facts = {"train_data": train_data, "vocab_size": data.vocab_size, **batches.facts}
    if world.size > 1:
        from drumline.train.ranks import agree

        agree(world, config, data, None if initialize else model, facts=facts)
    step = _step(config, model, batches, world)
    optim = scaled(config.optim, sequences=batches.plan.sequences)
    return Setup(
        folder=folder,
        world=world,
        step=step,
        batches=batches,
        seed=config.run.seed,
        lr=partial(learning_rate, optim=optim, total_steps=total_steps),
        resume_from=what_to_resume(config.run.resume_from, folder, world, started_again=own_pulse().started_again),
        allow_change=config.run.allow_change,
        retention=Retention(last=config.run.keep_checkpoints, every=config.run.keep_every, best=config.run.keep_best),
        guard_rules=GuardRules(**{rule.name: getattr(config.run, rule.name) for rule in fields(GuardRules)}),
        facts=facts,
        config_sha256=hashlib.sha256(to_toml(config).encode()).hexdigest()[:12],
        flops_per_item=lambda at: _flops(model, batches, at),
        initialize=initialize,
    )


def _flops(model: nn.Module, batches: TokenBatches, step: int) -> float:
    """FLOPs per sequence."""
    from drumline.model import flops_per_token

    return flops_per_token(model, context=batches.context_of(step)) * batches.tokens_per_item


def _model(config: TrainConfig, data: Data, world: World) -> nn.Module:
    torch.manual_seed(mix(config.run.seed))
    built = room("kernels").with_kernels(config, world.device) if world.device.type == "cuda" else config
    model = world.on_all_ranks(lambda: build_model(built, vocab_size=data.vocab_size))
    model = model.to(world.device) if config.ranks.shard == "none" else model  # each part goes where it belongs
    if config.model.model != "gpt":
        from drumline.model import check_loss

        world.on_all_ranks(lambda: check_loss(model, config, vocab_size=data.vocab_size))
    return model


def _step(config: TrainConfig, model: nn.Module, batches: TokenBatches, world: World) -> Step:
    if (config.ranks.shard, config.run.offload) != ("none", "none"):
        return room("sharding").sharded_step(config, model, batches, world)  # type: ignore[no-any-return]
    allow_tf32()
    precision = Precision.of(world.device, pick_dtype(config.run.dtype, world.device))
    if config.run.compile:
        model.compile()
    strategy = make_strategy(model, batches.plan, world, bitwise=config.ranks.bitwise)
    backward = Backward(token_objective, precision, batches.plan.sequences * batches.tokens_per_item, strategy.scale)
    if world.device.type == "cuda":
        backward = room("kernels").with_graphs(backward, model, strategy)
    optimizer = make_optimizer(model, config.optim, exact=config.ranks.bitwise)
    return Step(model, optimizer, strategy, backward, precision, config.optim.grad_clip or 0.0)


def _intervals(config: TrainConfig, *, total_steps: int) -> Intervals:
    run = config.run
    tenth = max(1, total_steps // 10)
    # Snapshots are for ranks that a supervisor restarts; a process without one leaves none behind.
    restarted = own_pulse().is_supervised or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return Intervals(
        total_steps=total_steps,
        log_every=config.records.log_every,
        eval_every=run.eval_every or tenth,
        save_every=Fraction(run.save_every or tenth),
        snapshot_every=(None if restarted else 0) if run.snapshot_every == "auto" else run.snapshot_every,
        snapshot_copies=run.snapshot_copies,
        compare_every=run.check_replicas_every or 0,
    )


def _evaluator(config: TrainConfig, data: Data, setup: Setup) -> Callable[[Pulse], Record] | None:
    if data.mix is not None and data.mix.valid:
        return data.mix.evaluator(config, data, setup)  # type: ignore[no-any-return]
    tokens = room("evals").data_for_tasks(config, data, setup.world) if config.run.eval_tasks else data.valid
    if tokens is None:
        return None

    def run(pulse: Pulse) -> Record:
        held_out = evaluate(
            setup.step.model,
            token_objective,
            tokens,
            context=config.model.context or 0,
            batch_size=config.batch.batch_size or 1,
            precision=setup.step.precision,
            world=setup.world,
            windows=config.run.eval_windows,
            document_mask=config.data.document_mask,
            each_batch=pulse.still_there,
        )
        return {"valid_loss": held_out.loss, "perplexity": held_out.perplexity, "bits_per_byte": held_out.bits_per_byte}

    return room("evals").with_tasks(run, config, data, setup) if config.run.eval_tasks else run
