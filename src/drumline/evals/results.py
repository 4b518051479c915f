"""Results of tasks, and where they go: evals/step-N.json in the run folder, the run's trackers, a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drumline.config import TrainConfig
from drumline.errors import ConfigError
from drumline.files import RunFolder, check_code, refuse_links, replace_text
from drumline.report import open_trackers, to_stderr


@dataclass(frozen=True)
class Result:
    """What a model reached in a task."""

    task: str
    items: int
    metrics: dict[str, float]
    """Metric -> value; METRIC_stderr is its standard error."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the numbers depend on beside the model."""


def rows_of(results: Sequence[Result]) -> list[list[str]]:
    """Task, metric, value, standard error and items of each metric."""
    return [
        [result.task, name, f"{value:.4f}", _error(result.metrics.get(f"{name}_stderr")), f"{result.items:,}"]
        for result in results
        for name, value in result.metrics.items()
        if not name.endswith("_stderr")
    ]


def _error(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def fields_of(results: Sequence[Result]) -> dict[str, float]:
    """The metrics as fields of a record: next_word_accuracy."""
    return {
        f"{result.task}_{name}": value
        for result in results
        for name, value in result.metrics.items()
        if not name.endswith("_stderr")
    }


def store(results: Sequence[Result], folder: RunFolder, step: int) -> Path | None:
    """Write evals/step-N.json, with what is there already of other tasks; None: there is no folder to write into."""
    if not folder.path.is_dir():
        return None  # an exported file
    refuse_links(folder)
    path = folder.evals / f"{folder.checkpoint_name(step)}.json"
    tasks: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError, KeyError):
        tasks = dict(json.loads(path.read_text(encoding="utf-8"))["tasks"])
    for result in results:
        # NaN is not valid JSON: strict parsers would reject the file.
        metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
        tasks[result.task] = {"items": result.items, "metrics": metrics, "settings": result.settings}
    try:
        folder.evals.mkdir(exist_ok=True)
        replace_text(path, json.dumps({"step": step, "tasks": tasks}, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the results cannot be written to {path}: {error.strerror}",
            fix="make room or the folder writable, and run the command again",
            details=[" ".join(row) for row in rows_of(results)],
        ) from None
    return path


def track(results: Sequence[Result], config: TrainConfig, folder: RunFolder, step: int, *, trusts: bool) -> None:
    """Give the results to the trackers that the run used; one that fails is reported, and no more."""
    records = config.records
    if not folder.path.is_dir() or not (records.tensorboard or records.use_wandb or records.sink):
        return
    try:
        check_code({"sink": records.sink}, folder.path, trusts=trusts)
        for tracker in open_trackers(records, folder, settings=asdict(config)):
            if note := getattr(tracker, "note", ""):
                to_stderr(note)
            tracker.write({"step": step, **fields_of(results)})
            tracker.close()
    except Exception as error:
        problem = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        to_stderr(f"warning: the results did not reach the run's trackers ({problem})")
