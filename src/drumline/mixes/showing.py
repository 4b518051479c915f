"""What a run has seen of its data, source by source, and what a prepared folder has: from small files alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from drumline.checkpoint import checkpoint_paths, open_checkpoint
from drumline.config import TrainConfig, is_mix, parse_mix, parse_stages
from drumline.data import TOKENIZER, TokenFile, read_manifest
from drumline.errors import CheckpointError, ConfigError
from drumline.files import RunFolder, origin, run_of, stored_config
from drumline.mixes.batches import schedule_of
from drumline.mixes.evaluation import MixEvaluation, evaluate_mix
from drumline.mixes.opening import MixTokens
from drumline.mixes.schedule import Schedule
from drumline.report import last_records
from drumline.train import Objective

Row = dict[str, Any]


def folder_rows(folder: Path) -> tuple[Row, list[Row]]:
    """What a prepared folder is, and its splits."""
    manifest = read_manifest(folder)
    about = {
        "source": manifest.source,
        "vocabulary": manifest.vocab_size,
        "tokenizer_sha256": manifest.files[TOKENIZER].sha256,
        "made_by": f"drumline {manifest.drumline_version}",
    }
    splits = [
        {"split": name, "tokens": own.tokens, "documents": own.documents, "text_bytes": own.text_bytes}
        for name, own in manifest.splits.items()
    ]
    return about, splits


def run_rows(path: Path) -> tuple[Row, list[Row]]:
    """Where a run is, and per source: tokens, weight now, tokens seen and left, its newest losses."""
    folder = run_of(path)
    config = stored_config(folder)
    if config is None:
        raise ConfigError(
            f"{path} is no run of drumline train and no prepared folder", fix="`drumline runs` lists the runs here"
        )
    sources, mixed = _sources(folder, config), is_mix(config.data.train_data_path)
    if not sources:
        raise ConfigError(f"{path} has no {folder.data.name}, which says what it trains on", fix="train it first")
    keys = {name: [f"{key}/{name}" if mixed else key for key in ("loss", "valid_loss")] for name in sources}
    newest = last_records(folder, "lr", *(key for own in keys.values() for key in own), step=sys.maxsize)
    status = folder.read_status()
    step = max([status.get("step", 0), *(at for at, _ in newest.values())])
    total_steps = max(step, status.get("total_steps") or config.batch.total_steps or 0)
    rows = _rows(config, sources, _data_step(folder, step), _data_step(folder, total_steps))
    for row, own in zip(rows, keys.values(), strict=True):
        row["loss"], row["valid_loss"] = (newest.get(key, (0, None))[1] for key in own)
    return {"run": str(folder.path), "step": step, "total_steps": total_steps}, rows


def _rows(config: TrainConfig, sources: Mapping[str, int], step: int, total_steps: int) -> list[Row]:
    """Of each source, after a step."""
    context, sequences = config.model.context or 1, config.batch.global_batch_size or 1
    schedule, at = _schedule(config, sources, total_steps=total_steps), step * sequences
    columns = (sources.items(), schedule.shares_at(at), schedule.seen(at), schedule.seen(total_steps * sequences))
    rows = []
    for (name, tokens), weight, seen, in_all in zip(*columns, strict=True):
        windows = max(1, (tokens - 1) // context)
        rows.append(
            {
                "source": name,
                "tokens": tokens,
                "weight": float(weight),
                "seen": seen * context,
                "epochs": seen / windows,
                "left_in_epoch": (windows - seen % windows) * context,
                "left_in_run": (in_all - seen) * context,
            }
        )
    return rows


def _sources(folder: RunFolder, config: TrainConfig) -> dict[str, int]:
    """The tokens of each source, by name; the name of a single one is its path."""
    about = origin(folder)
    if isinstance(about.get("sources"), list):
        return {str(each["name"]): int(each["tokens"]) for each in about["sources"]}
    return {config.data.train_data_path: int(about["tokens"])} if "tokens" in about else {}


def _schedule(config: TrainConfig, sources: Mapping[str, int], *, total_steps: int) -> Schedule:
    context, path = config.model.context or 1, config.data.train_data_path
    abouts = parse_mix(path) if is_mix(path) else parse_mix("data:1")
    return schedule_of(
        abouts,
        parse_stages(config.data.stages, list(sources)),
        [max(1, (tokens - 1) // context) for tokens in sources.values()],
        context=context,
        sequences=config.batch.global_batch_size or 1,
        total_steps=total_steps,
        seed=config.run.seed,
    )


def _data_step(folder: RunFolder, step: int) -> int:
    """The step whose data a step uses: rollbacks leave some out."""
    for path in reversed(checkpoint_paths(folder.checkpoints)):
        try:
            detours = open_checkpoint(path, read=("run.json",)).state.detours
        except CheckpointError:
            continue
        return step + sum(left_out for since, left_out in detours if since <= step)
    return step


def evaluate_run_mix(
    config: TrainConfig, folder: RunFolder, model: nn.Module, objective: Objective, tokens: TokenFile, **more: Any
) -> MixEvaluation:
    """The loss of a run over each source, and their mean with its shares of the whole run as weights."""
    assert isinstance(tokens, MixTokens)
    sources = _sources(folder, config)
    total_steps = folder.read_status().get("total_steps") or config.batch.total_steps or 1
    schedule = _schedule(config, sources, total_steps=total_steps)
    seen = schedule.seen(total_steps * (config.batch.global_batch_size or 1))
    parts = dict(zip(tokens.names, tokens.parts, strict=True))
    return evaluate_mix(model, objective, parts, weights=dict(zip(sources, seen, strict=True)), **more)
