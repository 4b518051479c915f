"""What a Trainer's run prints at its start and at its end, and where its records go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from drumline.config import RecordConfig, did_you_mean
from drumline.errors import ConfigError
from drumline.files import RunFolder
from drumline.report import FORMATS, JsonlSink, Record, Records, Sink, add_trackers, with_epochs
from drumline.train import FitResult, Setup, write_report
from drumline.trainer.objectives import Loss
from drumline.trainer.rates import Rates
from drumline.trainer.samples import Source
from drumline.units import count

TRACKERS = ("tensorboard", "wandb")


def check_sinks(sinks: Sequence[Sink | str]) -> None:
    for sink in sinks:
        if isinstance(sink, str) and sink not in TRACKERS:
            fix = did_you_mean(
                sink, TRACKERS, otherwise=f"use {' or '.join(TRACKERS)}, or an object with write(record)"
            )
            raise ConfigError(f"there is no sink {sink!r}", fix=fix)


def open_records(folder: RunFolder, sinks: Sequence[Sink | str], *, epochs: float | None, about: Any) -> Records:
    """The records of rank 0, in the run folder and wherever else they are asked for."""
    folder.path.mkdir(parents=True, exist_ok=True)
    named = RecordConfig(tensorboard="tensorboard" in sinks, use_wandb="wandb" in sinks)
    others = (sink for sink in sinks if not isinstance(sink, str))
    records = Records([JsonlSink(folder.metrics), *others], log=folder.log)
    add_trackers(records, named, folder, settings=about)
    records.formats = dict(FORMATS if epochs is None else with_epochs(epochs))
    return records


def show_metrics(formats: dict[str, Callable[[Any], str]], record: Record) -> None:
    """Let the console show what an evaluation has computed, besides what it knows."""
    for key, value in record.items():
        if key not in formats and isinstance(value, int | float):
            formats[key] = partial("{0} {1:.4f}".format, key.removeprefix("valid_"))


def introduction(
    setup: Setup, source: Source, valid: Source | None, loss: Loss | None, *, rates: Rates | None, total_steps: int
) -> str:
    batches, plan, precision = setup.batches, setup.batches.plan, setup.step.precision
    optimizer = setup.step.optimizer
    parameters = sum(p.numel() for p in setup.step.model.parameters())
    held_out = f"{len(valid):,} for validation" if valid is not None else "none for validation"
    by = getattr(loss, "__name__", type(loss).__name__) if loss is not None else "the model's own loss"
    return "\n".join(
        [
            f"run    {setup.folder.path}",
            f"model  {type(setup.step.model).__name__}: {count(parameters)} parameters, "
            f"on {precision.device.type} in {str(precision.dtype).removeprefix('torch.')}, by {by}",
            f"data   {len(source):,} samples, {held_out}{'' if source.shuffle else '; not shuffled'}",
            f"step   {plan.formula(setup.world.size)} = {plan.sequences} samples",
            f"lr     {_rates(optimizer.param_groups, rates)} by {type(optimizer).__name__}",
            f"steps  {total_steps:,}, which is {total_steps * plan.sequences / batches.items:.2f} epochs",
        ]
    )


def idle_settings(shard: object, units: str | Sequence[str], *, snapshot_copies: int) -> list[str]:
    """A note on each setting of sharded models that was given for another."""
    given = {"shard_units": bool(units), "snapshot_copies": snapshot_copies > 1} if shard == "none" else {}
    notes = {
        "shard_units": "no weights are gathered",
        "snapshot_copies": "each host has all of a snapshot anyway",
    }
    return [f"note: {name} does nothing without shard: {notes[name]}" for name, is_given in given.items() if is_given]


def _rates(groups: Sequence[Mapping[str, Any]], rates: Rates | None) -> str:
    if rates is not None and rates.by:
        base = rates.by
    else:
        base = ", ".join(dict.fromkeys(f"{float(group['lr']):g}" for group in groups))
    return base if rates is None or rates.factor == 1.0 else f"{base} x {rates.factor:g} (scaled to the batch)"


def ending(records: Records, folder: RunFolder, result: FitResult, *, did_nothing: bool) -> None:
    """How to go on from here."""
    if result.state != "finished":
        records.say(f"stopped at step {result.step:,}, everything is saved in {folder.path}; to resume, run it again")
    elif did_nothing:
        records.say(
            f"this run had finished already, at step {result.step:,}; to train it further, give more epochs or steps; "
            "for a new one, another run_dir"
        )
    else:
        write_report(folder, records)
        records.say(f"done   {folder.path}: weights {result.weights_sha256[:12]}")
