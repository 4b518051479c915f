"""The folders of runs: which one a new run takes, and what a run was started with."""

from __future__ import annotations

from pathlib import Path

from drumline.config import TrainConfig, differences, from_settings, read_settings
from drumline.files.run_folder import RunFolder

RUNS_DIR = Path("runs")


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
