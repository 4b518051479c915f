"""Runs on disk: choose a folder for a new one, list them, load the model of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from drumline.checkpoint import checkpoints
from drumline.config.settings import TrainConfig
from drumline.config.toml_file import differences, from_settings, read_settings
from drumline.errors import CheckpointError
from drumline.model.gpt import GPT
from drumline.plugins import load_plugin
from drumline.config.presets import gpt_config
from drumline.report.records import read_metrics
from drumline.files.run_folder import RunFolder
from drumline.data.tokenizer import Tokenizer

RUNS_DIR = Path("runs")
_VOCAB_MULTIPLE = 64


def choose_folder(config: TrainConfig) -> RunFolder:
    """The folder asked for; else runs/PRESET, runs/PRESET-2, ...: the first that is free, or this config unfinished."""
    if config.run.run_dir is not None:
        return RunFolder(Path(config.run.run_dir))
    number = 1
    while True:
        folder = RunFolder(RUNS_DIR / (config.model.preset if number == 1 else f"{config.model.preset}-{number}"))
        if not folder.path.exists() or (folder.state() in ("stopped", "lost", "failed") and _same(folder, config)):
            return folder
        number += 1


def _same(folder: RunFolder, config: TrainConfig) -> bool:
    stored = stored_config(folder)
    return (
        stored is not None
        and stored.data.train_data_path == config.data.train_data_path
        and not differences(stored, config)
    )


def stored_config(folder: RunFolder) -> TrainConfig | None:
    return from_settings(read_settings(folder.config)) if folder.config.exists() else None


def build_model(config: TrainConfig, *, vocab_size: int) -> nn.Module:
    """The model a config (filled in) describes, with freshly drawn weights; draw them after seeding torch."""
    padded = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE  # matrix products are faster on round sizes
    shape = gpt_config(config.model, vocab_size=padded)
    if config.model.model == "gpt":
        return GPT(shape)
    model: nn.Module = load_plugin(config.model.model)(shape)
    return model


@dataclass(frozen=True)
class LoadedRun:
    folder: RunFolder
    config: TrainConfig
    step: int
    model: nn.Module
    tokenizer: Tokenizer | None
    vocab_size: int


def load_run(path: Path) -> LoadedRun:
    """The newest valid checkpoint of a run, or the very checkpoint `path` names, with its model and tokenizer."""
    folder = RunFolder(path if (path / "config.toml").exists() else path.parent.parent)
    config = stored_config(folder)
    if config is None or config.data.vocab_size is None:
        raise CheckpointError(
            f"{path} is neither a run nor a checkpoint of one", fix="`drumline runs` lists the runs here"
        )
    warnings: list[str] = []
    found = (
        checkpoints.open_checkpoint(path)
        if path != folder.path
        else checkpoints.newest_valid(folder.checkpoints, warn=warnings.append)
    )
    if found is None:
        raise CheckpointError(
            f"the run {path} has no valid checkpoint yet", fix="let it train until its first save (--save_every)"
        )
    tokenizer = Tokenizer.load(folder.tokenizer) if folder.tokenizer.exists() else None
    vocab_size = tokenizer.vocab_size if tokenizer else config.data.vocab_size
    model = build_model(config, vocab_size=vocab_size)
    checkpoints.load(found, model=model, optimizer=None)
    return LoadedRun(folder, config, found.step, model, tokenizer, vocab_size)


def list_runs(where: Path) -> Iterator[dict[str, Any]]:
    """One row per run below a folder: name, state, step, last losses, when it was last heard of."""
    for config in sorted(where.glob("*/config.toml")):
        folder = RunFolder(config.parent)
        records, status = read_metrics(folder.metrics), folder.read_status()
        yield {
            "run": str(folder.path),
            "state": folder.state(),
            "step": records[-1]["step"] if records else status.get("step", 0),
            "total_steps": status.get("total_steps", 0),
            "loss": _last(records, "loss"),
            "valid_loss": _last(records, "valid_loss"),
            "bits_per_byte": _last(records, "bits_per_byte"),
            "updated": status.get("updated", ""),
            "cause": status.get("cause"),
        }


def _last(records: list[dict[str, Any]], key: str) -> float | None:
    return next((record[key] for record in reversed(records) if record.get(key) is not None), None)
