"""From a TrainConfig to a finished run: prepare the text, build the model, train, show what it learned."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from drumline import checkpoints
from drumline.agreement import compare, settings, versions
from drumline.batches import TokenBatches, mix, plan_batches
from drumline.cluster import World, join, leave
from drumline.config import DataConfig, OptimConfig, TrainConfig
from drumline.config_file import differences, from_settings, read_settings, sections, to_toml
from drumline.disk import replace_text
from drumline.errors import ConfigError
from drumline.evaluate import evaluate
from drumline.hardware import allow_tf32, pick_dtype
from drumline.loop import FitResult, Loop
from drumline.model import GPT
from drumline.optim import learning_rate, make_optimizer, scaled
from drumline.parallel import make_strategy
from drumline.plots import plot_loss
from drumline.prepare import Prepared, ProgressCallback, cached
from drumline.presets import gpt_config, preset, with_preset
from drumline.records import JsonlSink, Record, Records, Sink, count
from drumline.run_folder import RunFolder
from drumline.runs import build_model, choose_folder
from drumline.sample import SampleConfig, generate
from drumline.step import Precision
from drumline.text import Skipped
from drumline.tokenizer import StreamDecoder, Tokenizer
from drumline.tokens import TokenFile, has_tokens, is_tokens, open_tokens
from drumline.trackers import open_trackers

T = TypeVar("T")
SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class Data:
    """What a run trains on and is judged by."""

    train: TokenFile
    valid: TokenFile | None
    tokenizer: Tokenizer | None
    vocab_size: int
    skipped: Skipped
    """What could not be read, where the user chose to go on."""


def token_objective(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
    """The summed cross entropy of a micro-batch of windows."""
    inputs, targets, documents = batch
    extra = {} if documents is None else {"document_ids": documents}
    loss: Tensor = model(inputs, targets=targets, **extra)[1]
    return loss


def open_data(config: TrainConfig, *, progress: ProgressCallback | None = None) -> Data:
    """Token files as they are; text prepared first, or reused if it was prepared before."""
    data, skipped = config.data, Skipped()
    path: str | Path = data.train_data_path
    valid_path: str | Path | None = data.valid_data_path
    if not is_tokens(path):
        if valid_path is not None and is_tokens(valid_path):
            raise ConfigError(
                f"train_data_path {path} is text, and valid_data_path {valid_path} is tokens of another tokenizer",
                fix="give both as text, or both as tokens made by one `drumline prepare`",
            )
        prepared = _prepared(data, progress)
        path, valid_path, skipped = prepared.path, None, prepared.skipped
    tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer else None
    train = open_tokens(path, split="train")
    if train.vocab_size is None:  # a peer's file does not say; it is checked against the tokenizer or the setting
        train = open_tokens(path, split="train", vocab_size=tokenizer.vocab_size if tokenizer else data.vocab_size)
    if tokenizer is None and train.tokenizer_path is not None:
        tokenizer = Tokenizer.load(train.tokenizer_path)
    vocab_size = train.vocab_size or (tokenizer.vocab_size if tokenizer else data.vocab_size)
    assert vocab_size is not None
    if valid_path is None and has_tokens(path, "valid"):
        valid_path = path
    valid = open_tokens(valid_path, split="valid", vocab_size=vocab_size) if valid_path is not None else None
    return Data(train, valid, tokenizer, vocab_size, skipped)


def _prepared(data: DataConfig, progress: ProgressCallback | None) -> Prepared:
    return cached(
        data.train_data_path,
        data.data_dir,
        tokenizer=data.tokenizer,
        vocab_size=_known(data.vocab_size),
        field=data.field,
        on_error=data.on_error,
        valid_source=data.valid_data_path,
        valid_fraction=data.valid_fraction,
        progress=progress,
    )


def pretrain(config: TrainConfig, *, progress: ProgressCallback | None = None) -> FitResult:
    """Train as the config says, in its run folder, from wherever that run is; every rank calls this."""
    world = join(device=config.run.device, backend=config.ranks.backend, bitwise=config.ranks.bitwise)
    try:
        return _pretrain(config, world, progress)
    finally:
        leave()


def _pretrain(config: TrainConfig, world: World, progress: ProgressCallback | None) -> FitResult:
    config = world.together(lambda: _filled_in(config))
    world.on_main(lambda: checkpoints.check_resume(config.run.resume_from))
    folder = RunFolder(Path(world.on_main(lambda: str(choose_folder(config).path))))
    stored = _stored(folder, world)
    data = _open_data_in_turn(config, world, progress)
    config = world.together(lambda: _settled(config, folder, stored, world))
    plan = plan_batches(config.batch, default_batch_size=1, world_size=world.size)
    world.together(lambda: plan.share(world.rank, world.size))
    batches = world.together(
        lambda: TokenBatches(
            data.train,
            plan,
            context=_known(config.model.context),
            seed=config.run.seed,
            document_mask=config.data.document_mask,
        )
    )
    total_steps = config.batch.total_steps or math.ceil(_known(config.batch.epochs) * batches.items / plan.sequences)
    records = world.together(lambda: _open_records(config, folder, data, world))
    try:
        loop = _loop(config, folder, data, batches, world, records, total_steps=total_steps)
        records.say("\n".join(_introduction(config, data, loop, total_steps=total_steps)))
        result = loop.run(
            total_steps=total_steps,
            log_every=config.records.log_every,
            eval_every=config.run.eval_every or max(1, total_steps // 10),
            save_every=Fraction(config.run.save_every or max(1, total_steps // 10)),
            evaluate=_evaluator(config, data, loop) if data.valid is not None else None,
        )
        if world.is_main:
            _conclude(config, data, loop, records, result)
    finally:
        records.close()
    return result


def _filled_in(config: TrainConfig) -> TrainConfig:
    """With the preset's settings; refuses what cannot work before any text is prepared."""
    config = with_preset(config)
    gpt_config(config.model, vocab_size=1)
    _check_allowed(config.run.allow_change)
    return config


def _stored(folder: RunFolder, world: World) -> TrainConfig | None:
    """What the run was started with, as rank 0 finds it: other hosts may not see the folder."""
    settings = world.on_main(lambda: read_settings(folder.config) if folder.config.exists() else None)
    return from_settings(settings) if settings is not None else None


def _open_data_in_turn(config: TrainConfig, world: World, progress: ProgressCallback | None) -> Data:
    """Rank 0 prepares the text, then one rank of each other host, which may have its own disk; then all read it."""
    own = world.place.local_rank == 0
    first = world.together(lambda: open_data(config, progress=progress) if world.is_main else None)
    world.together(lambda: open_data(config) if own and not world.is_main else None)
    data = world.together(lambda: open_data(config))
    return replace(data, skipped=first.skipped) if first is not None else data  # who prepared knows what it skipped


def _open_records(config: TrainConfig, folder: RunFolder, data: Data, world: World) -> Records:
    """Rank 0 writes the run's files and tells people; the others are silent."""
    if not world.is_main:
        return Records([], log=None, silent=True)
    folder.path.mkdir(parents=True, exist_ok=True)
    if data.tokenizer is not None:
        data.tokenizer.save(folder.tokenizer)
    sinks: list[Sink] = [JsonlSink(folder.metrics), *open_trackers(config.records, folder, settings=asdict(config))]
    replace_text(folder.config, to_toml(replace(config, run=replace(config.run, resume_from="auto", allow_change=()))))
    return Records(sinks, log=folder.log)


def _settled(config: TrainConfig, folder: RunFolder, stored: TrainConfig | None, world: World) -> TrainConfig:
    """The config with what only the run folder can tell: the size of a step, and the folder itself."""
    batch = config.batch
    if stored is not None and batch.global_batch_size in (None, stored.batch.global_batch_size):
        # The size of a step was fixed when the run began, whatever is started now.
        batch = replace(
            batch,
            gradient_accumulation_steps=None,
            global_batch_size=stored.batch.global_batch_size,
            batch_size=batch.batch_size or stored.batch.batch_size,
        )
    plan = plan_batches(batch, default_batch_size=preset(config.model.preset).batch_size, world_size=world.size)
    settled = replace(
        config,
        batch=replace(
            batch,
            batch_size=plan.micro_batch,
            global_batch_size=plan.sequences,
            gradient_accumulation_steps=None,
        ),
        run=replace(config.run, run_dir=str(folder.path)),
    )
    _check_changes(settled, folder, stored)
    return settled


def _check_allowed(names: Sequence[str]) -> None:
    known = [name for section in sections().values() for name in section]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"--allow_change {name} does not name a setting",
                fix=f"did you mean {near[0]}?" if near else "name the setting as its flag is called",
            )


def _check_changes(config: TrainConfig, folder: RunFolder, stored: TrainConfig | None) -> None:
    """A run goes on only as the run it is, but for what --allow_change names."""
    changed = differences(stored, config) if stored is not None else {}
    refused = {name: values for name, values in changed.items() if name not in config.run.allow_change}
    if refused:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in refused.items())
        allow = " ".join(f"--allow_change {name}" for name in refused)
        raise ConfigError(
            f"{folder.path} was started with other settings: {listed}",
            fix=f"choose another --run_dir for a new run, or add {allow} to change this one",
        )


def _loop(
    config: TrainConfig,
    folder: RunFolder,
    data: Data,
    batches: TokenBatches,
    world: World,
    records: Records,
    *,
    total_steps: int,
) -> Loop:
    allow_tf32()
    torch.manual_seed(mix(config.run.seed))
    model = world.together(lambda: build_model(config, vocab_size=data.vocab_size)).to(world.device)
    facts = {"train_data": data.train.sha256 or f"{len(data.train)} tokens", "vocab_size": data.vocab_size}
    compare(
        world,
        {
            **versions(),
            **settings(config),
            **facts,
            "tokenizer": data.tokenizer.sha256 if data.tokenizer else None,
            "valid_data": data.valid and (data.valid.sha256 or len(data.valid)),
            "initial weights": checkpoints.weights_sha256(model),
        },
    )
    if config.run.compile:
        records.say("compiling: the first step will take a while")
        model.compile()
    optim = scaled(config.optim, sequences=batches.plan.sequences)
    return Loop(
        folder=folder,
        model=model,
        optimizer=make_optimizer(model, config.optim),
        batches=batches,
        objective=token_objective,
        precision=Precision.of(world.device, pick_dtype(config.run.dtype, world.device)),
        world=world,
        strategy=make_strategy(model, batches.plan, world, bitwise=config.ranks.bitwise),
        seed=config.run.seed,
        lr=partial(learning_rate, optim=optim, total_steps=total_steps),
        grad_clip=config.optim.grad_clip,
        resume_from=config.run.resume_from,
        allow_change=config.run.allow_change,
        keep_checkpoints=config.run.keep_checkpoints,
        max_nonfinite=config.run.max_nonfinite,
        facts=facts,
        flops_per_item=model.flops_per_token(batches.weight) * batches.weight if isinstance(model, GPT) else None,
        records=records,
    )


def _evaluator(config: TrainConfig, data: Data, loop: Loop) -> Callable[[], Record]:
    def run() -> Record:
        assert data.valid is not None
        found = evaluate(
            loop.model,
            token_objective,
            data.valid,
            context=_known(config.model.context),
            batch_size=_known(config.batch.batch_size),
            precision=loop.precision,
            world=loop.world,
            windows=config.run.eval_windows,
            document_mask=config.data.document_mask,
        )
        return {"valid_loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}

    return run


def _introduction(config: TrainConfig, data: Data, loop: Loop, *, total_steps: int) -> list[str]:
    batches, plan, precision = loop.batches, loop.batches.plan, loop.precision
    parameters = sum(p.numel() for p in loop.model.parameters())
    held_out = f"{count(len(data.valid))} tokens held out" if data.valid is not None else "nothing held out"
    unreadable = (
        f"; skipped {data.skipped.count} unreadable, first: {data.skipped.first[0]}" if data.skipped.count else ""
    )
    return [
        f"run    {loop.folder.path}",
        f"model  {config.model.preset}: {count(parameters)} parameters, context {batches.weight}, "
        f"on {precision.device.type} in {str(precision.dtype).removeprefix('torch.')}",
        f"data   {config.data.train_data_path}: {count(len(data.train))} tokens, {held_out}, "
        f"vocabulary {data.vocab_size:,}{unreadable}",
        f"step   {plan.formula(loop.world.size)} = {plan.sequences} sequences "
        f"= {plan.sequences * batches.weight:,} tokens",
        f"lr     {_lr_formula(config.optim, plan.sequences)}",
        f"steps  {total_steps:,}, which is {total_steps * plan.sequences / batches.items:.2f} epochs",
    ]


def _lr_formula(optim: OptimConfig, sequences: int) -> str:
    if optim.scale_lr == "none":
        return f"{optim.lr:g} at its peak"
    root = "square root of " if optim.scale_lr == "sqrt" else ""
    peak = scaled(optim, sequences=sequences).lr
    return f"{optim.lr:g} x {root}({sequences} / {optim.base_batch_size} sequences) = {peak:g} at its peak"


def _conclude(config: TrainConfig, data: Data, loop: Loop, records: Records, result: FitResult) -> None:
    folder = loop.folder
    if result.state != "finished":
        records.say(
            f"stopped at step {result.step:,}, everything is saved; to go on:\n  drumline train --run_dir {folder.path}"
        )
        return
    title = f"{config.model.preset} on {config.data.train_data_path}"
    plot_loss(folder.metrics, folder.loss_plot, title=title)
    if data.tokenizer is not None and isinstance(loop.model, GPT):
        records.say("\nwhat the model writes now:\n" + _indented(_sample(config, data.tokenizer, loop.model)))
    records.say(
        f"\nfinished: {folder.path} (loss curve: {folder.loss_plot})\n"
        f"weights sha256 {result.weights_sha256}\n"
        f"next:\n"
        f"  drumline sample {folder.path} --prompt 'def '\n"
        f"  drumline evaluate {folder.path}\n"
        f"  drumline runs"
    )


def _sample(config: TrainConfig, tokenizer: Tokenizer, model: GPT) -> str:
    decoder = StreamDecoder(tokenizer)
    settings = SampleConfig(max_tokens=SAMPLE_TOKENS, seed=config.run.seed)
    prompt = tokenizer.encode(config.records.sample_prompt)
    text = "".join(
        decoder.push(token) for token in generate(model, prompt, settings, end_of_text=tokenizer.end_of_text)
    )
    return config.records.sample_prompt + text + decoder.flush()


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _known(value: T | None) -> T:
    """A setting that with_preset has filled in."""
    assert value is not None
    return value
