"""From a TrainConfig to a finished run: prepare the text, build the model, train, show what it learned."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from drumline.checkpoint import Retention, check_resume, weights_sha256, what_to_resume
from drumline.config import (
    OptimConfig,
    TrainConfig,
    differences,
    from_settings,
    gpt_config,
    preset,
    read_settings,
    sections,
    to_toml,
    with_preset,
)
from drumline.data import (
    SHORTER,
    Data,
    ProgressCallback,
    StreamDecoder,
    TokenBatches,
    Tokenizer,
    mix,
    open_data,
    plan_batches,
)
from drumline.errors import ConfigError
from drumline.files import RunFolder, choose_folder, replace_text
from drumline.lazy import room
from drumline.model import GPT, build_model, token_objective
from drumline.optim import learning_rate, make_optimizer, scaled
from drumline.parallel import (
    World,
    allow_tf32,
    compare,
    digest,
    is_hopper,
    is_supervised,
    join,
    leave,
    make_strategy,
    pick_dtype,
    promise_an_ending,
    settings,
    started_again,
    tell_run_dir,
    versions,
)
from drumline.report import JsonlSink, Record, Records, Sink, open_trackers, plot_loss
from drumline.signals import raising
from drumline.train.evaluation import evaluate
from drumline.train.guard import GuardRules
from drumline.train.loop import FitResult, Loop
from drumline.train.step import Precision
from drumline.units import count

T = TypeVar("T")
SAMPLE_TOKENS = 120


def pretrain(config: TrainConfig, *, progress: ProgressCallback | None = None) -> FitResult:
    """Train as the config says, in its run folder, from wherever that run is; every rank calls this."""
    promise_an_ending()
    world = join(device=config.run.device, backend=config.ranks.backend, bitwise=config.ranks.bitwise)
    try:
        return _pretrain(config, world, progress)
    finally:
        leave()


def _pretrain(config: TrainConfig, world: World, progress: ProgressCallback | None) -> FitResult:
    config = world.together(lambda: _filled_in(config, world.device))
    folder = RunFolder(Path(world.on_main(lambda: str(choose_folder(config).path))))
    world.on_main(lambda: check_resume(config.run.resume_from, folder))
    stored = _stored(folder, world)
    data = open_in_turn(config, world, progress)
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
    batches.short_steps = round(_known(config.batch.short_contexts) * total_steps)
    with ExitStack() as held:
        world.on_main(lambda: held.enter_context(folder.hold()))
        tell_run_dir(folder.path)
        records = world.together(lambda: _open_records(config, folder, data, world))
        held.callback(records.close)
        loop = _loop(config, folder, data, batches, world, records, total_steps=total_steps)
        records.say("\n".join([*_introduction(config, data, loop, total_steps=total_steps), *_advice()]))
        result = loop.run(
            total_steps=total_steps,
            log_every=config.records.log_every,
            eval_every=config.run.eval_every or max(1, total_steps // 10),
            save_every=Fraction(_save_every(config, total_steps=total_steps)),
            evaluate=_evaluator(config, data, loop) if data.valid is not None else None,
        )
        return _concluded(config, data, loop, records, result) if world.is_main else result


def open_in_turn(config: TrainConfig, world: World, progress: ProgressCallback | None) -> Data:
    """Rank 0 prepares the text, then one rank of each other host, which may have its own disk; then all read it."""
    own = world.place.local_rank == 0
    first = world.together(lambda: open_data(config, progress=progress) if world.is_main else None)
    world.together(lambda: open_data(config) if own and not world.is_main else None)
    data = world.together(lambda: open_data(config))
    return replace(data, skipped=first.skipped) if first is not None else data  # who prepared knows what it skipped


def _filled_in(config: TrainConfig, device: torch.device) -> TrainConfig:
    """With the preset's settings; refuses what cannot work before any text is prepared."""
    config = with_preset(config)
    gpt_config(config.model, vocab_size=1)
    if config.run.fp8:
        room("kernels").check_fp8(config, device)
    if config.batch.short_contexts and _known(config.model.context) % SHORTER:
        raise ConfigError(
            f"a context of {config.model.context} tokens cannot be read as {SHORTER} short ones",
            fix=f"choose --context as a multiple of {SHORTER}, or use --short_contexts 0",
        )
    _check_allowed(config.run.allow_change)
    return config


def _stored(folder: RunFolder, world: World) -> TrainConfig | None:
    """What the run was started with, as rank 0 finds it: other hosts may not see the folder."""
    settings = world.on_main(lambda: read_settings(folder.config) if folder.config.exists() else None)
    return from_settings(settings) if settings is not None else None


def _open_records(config: TrainConfig, folder: RunFolder, data: Data, world: World) -> Records:
    """Rank 0 writes the run's files and tells people; the others are silent."""
    if not world.is_main:
        return Records([], log=None, silent=True)
    folder.path.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [JsonlSink(folder.metrics), *open_trackers(config.records, folder, settings=asdict(config))]
    records = Records(sinks, log=folder.log)
    stored = to_toml(replace(config, run=replace(config.run, resume_from="auto", allow_change=())))
    tokenizer = data.tokenizer
    if not folder.config.exists():  # a run that cannot even begin is not worth going on with
        if tokenizer is not None:
            tokenizer.save(folder.tokenizer)
        replace_text(folder.config, stored)
    elif folder.config.read_text(encoding="utf-8") != stored:
        records.attempt(str(folder.config), lambda: replace_text(folder.config, stored))
    return records


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
    built = room("kernels").with_kernels(config, world.device) if _may_have_kernels(config, world.device) else config
    model = world.together(lambda: build_model(built, vocab_size=data.vocab_size)).to(world.device)
    facts = {"train_data": data.train.sha256 or f"{len(data.train)} tokens", "vocab_size": data.vocab_size}
    compare(world, {**versions(), **settings(config), **facts, **_origins(data, model)})
    dtype = pick_dtype(config.run.dtype, world.device)
    if config.run.compile:
        model.compile()
    if config.run.compile or (built is not config and cast(Any, model).is_fused(world.device, dtype)):
        records.say("compiling: the first step will take a while")
    strategy = make_strategy(model, batches.plan, world, bitwise=config.ranks.bitwise)
    precision = Precision.of(world.device, dtype)
    if world.device.type == "cuda":
        strategy = room("kernels").with_graphs(strategy, model, precision)
    return Loop(
        folder=folder,
        model=model,
        optimizer=make_optimizer(model, config.optim),
        batches=batches,
        objective=token_objective,
        precision=precision,
        world=world,
        strategy=strategy,
        seed=config.run.seed,
        lr=partial(
            learning_rate, optim=scaled(config.optim, sequences=batches.plan.sequences), total_steps=total_steps
        ),
        grad_clip=_known(config.optim.grad_clip),
        resume_from=what_to_resume(config.run.resume_from, folder, world, started_again=started_again()),
        allow_change=config.run.allow_change,
        retention=Retention(last=config.run.keep_checkpoints, every=config.run.keep_every, best=config.run.keep_best),
        guard_rules=GuardRules(
            on_nonfinite=config.run.on_nonfinite,
            max_nonfinite=config.run.max_nonfinite,
            spike_factor=config.run.spike_factor,
            max_rollbacks=config.run.max_rollbacks,
            check_replicas_every=config.run.check_replicas_every,
        ),
        snapshot_every=_snapshot_every(config, total_steps=total_steps),
        facts=facts,
        config_sha256=digest(to_toml(config)),
        flops_per_item=partial(_flops, model, batches) if isinstance(model, GPT) else None,
        records=records,
    )


def _may_have_kernels(config: TrainConfig, device: torch.device) -> bool:
    return config.run.fp8 or (is_hopper(device) and not config.ranks.bitwise)


def _origins(data: Data, model: nn.Module) -> dict[str, Any]:
    """What else every rank must have alike."""
    return {
        "tokenizer": data.tokenizer.sha256 if data.tokenizer else None,
        "valid_data": data.valid and (data.valid.sha256 or len(data.valid)),
        "initial weights": weights_sha256(model),
    }


def _flops(model: GPT, batches: TokenBatches, step: int) -> float:
    return model.flops_per_token(batches.context_of(step)) * batches.weight


def _save_every(config: TrainConfig, *, total_steps: int) -> int:
    return config.run.save_every or max(1, total_steps // 10)


def _snapshot_every(config: TrainConfig, *, total_steps: int) -> int:
    """Copies in memory are for ranks that are started again; a process that nobody starts again leaves none behind."""
    if config.run.snapshot_every is not None:
        return config.run.snapshot_every
    restarted = is_supervised() or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return max(1, _save_every(config, total_steps=total_steps) // 10) if restarted else 0


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
            each_batch=loop.pulse.still_there,
        )
        return {"valid_loss": found.loss, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}

    return run


def _introduction(config: TrainConfig, data: Data, loop: Loop, *, total_steps: int) -> list[str]:
    batches, plan, precision = loop.batches, loop.batches.plan, loop.precision
    parameters = sum(p.numel() for p in loop.model.parameters())
    held_out = f"{count(len(data.valid))} tokens held out" if data.valid is not None else "nothing held out"
    short = ""
    if isinstance(batches, TokenBatches) and batches.short_steps:
        short = f"; the first {batches.short_steps:,} in contexts of {batches.context_of(0)}"
    unreadable = (
        f"; skipped {data.skipped.count} unreadable, first: {data.skipped.first[0]}" if data.skipped.count else ""
    )
    return [
        f"run    {loop.folder.path}",
        f"model  {config.model.preset}: {count(parameters)} parameters, context {batches.weight}, "
        f"on {precision.device.type} in {str(precision.dtype).removeprefix('torch.')}"
        f"{' and float8' if config.run.fp8 else ''}",
        f"data   {config.data.train_data_path}: {count(len(data.train))} tokens, {held_out}, "
        f"vocabulary {data.vocab_size:,}{unreadable}",
        f"step   {plan.formula(loop.world.size)} = {plan.sequences} sequences "
        f"= {plan.sequences * batches.weight:,} tokens",
        f"lr     {_lr_formula(config.optim, plan.sequences, muon_lr=preset(config.model.preset).muon_lr)}",
        f"steps  {total_steps:,}, which is {total_steps * plan.sequences / batches.items:.2f} epochs{short}",
    ]


def _advice() -> list[str]:
    return room("elastic").under_torchrun() if "TORCHELASTIC_RUN_ID" in os.environ else []


def _lr_formula(optim: OptimConfig, sequences: int, *, muon_lr: float) -> str:
    formula, peak = f"{optim.lr:g}", _known(scaled(optim, sequences=sequences).lr)
    if optim.scale_lr != "none":
        root = "square root of " if optim.scale_lr == "sqrt" else ""
        formula += f" x {root}({sequences} / {optim.base_batch_size} sequences) = {peak:g}"
    rates = {"embeddings": optim.embedding_lr, "head": optim.head_lr}
    others = [f", {name} {rate * peak / _known(optim.lr):g}" for name, rate in rates.items() if rate is not None]
    hint = ""
    if optim.optimizer == "muon" and peak < muon_lr / 8:  # as one would give it to AdamW
        hint = f"; rates near {muon_lr:g} suit Muon, and --recipe classic is AdamW's way"
    return f"{formula} at its peak by {optim.optimizer}{''.join(others)}{hint}"


def _concluded(config: TrainConfig, data: Data, loop: Loop, records: Records, result: FitResult) -> FitResult:
    """How the run ended, with all that is shown at its end, unless a signal cuts that short."""
    try:
        with raising():
            _conclude(config, data, loop, records, result)
    except KeyboardInterrupt:
        again = f"drumline train --run_dir {loop.folder.path}"
        records.say(f"stopped after the last step, everything is saved; to see how it ended:\n  {again}")
        return replace(result, state="stopped")
    return result


def _conclude(config: TrainConfig, data: Data, loop: Loop, records: Records, result: FitResult) -> None:
    folder = loop.folder
    if result.state != "finished":
        records.say(
            f"stopped at step {result.step:,}, everything is saved; to go on:\n  drumline train --run_dir {folder.path}"
        )
        return
    title = f"{config.model.preset} on {config.data.train_data_path}"
    records.attempt(str(folder.loss_plot), lambda: plot_loss(folder.metrics, folder.loss_plot, title=title))
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
    generate = room("generate")
    settings = generate.SampleConfig(max_tokens=SAMPLE_TOKENS, seed=config.run.seed)
    prompt = tokenizer.encode(config.records.sample_prompt)
    text = "".join(
        decoder.push(token) for token in generate.generate(model, prompt, settings, end_of_text=tokenizer.end_of_text)
    )
    return config.records.sample_prompt + text + decoder.flush()


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _known(value: T | None) -> T:
    """A setting that with_preset has filled in."""
    assert value is not None
    return value
