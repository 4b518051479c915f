"""The runs in a folder, one row each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.files import RunFolder, run_folders, run_state, stalled_share
from drumline.report.records import read_metrics


def list_runs(where: Path) -> Iterator[dict[str, Any]]:
    """One row per run in a folder: name, state, step, last losses, time lost to saves and snapshots, last update."""
    for folder in run_folders(where):
        records, status = list[dict[str, Any]](), folder.read_status()
        with suppress(OSError):  # not ours to read
            records = read_metrics(folder.metrics)
        yield {
            "run": str(folder.path),
            "state": run_state(folder) if status or not folder.status.exists() else "unknown",
            # A run that was stopped is further than its last log line, one that runs than its last checkpoint.
            "step": max(records[-1]["step"] if records else 0, status.get("step", 0)),
            "total_steps": status.get("total_steps", 0),
            "loss": _last(records, "loss"),
            "valid_loss": _last(records, "valid_loss"),
            "bits_per_byte": _last(records, "bits_per_byte"),
            "stalled": stalled_share(folder.events),
            "updated": status.get("updated", ""),
            "cause": status.get("cause"),
        }


def last_records(folder: RunFolder, *keys: str, step: int) -> dict[str, tuple[int, float]]:
    """The last value of each key up to a step, with its own step; keys without one are missing."""
    records = [record for record in read_metrics(folder.metrics) if record["step"] <= step]
    steps = {key: [each["step"] for each in records if isinstance(each.get(key), int | float)] for key in keys}
    return {key: (own[-1], float(_last(records, key) or 0.0)) for key, own in steps.items() if own}


def training_records(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """The records of training steps, by step."""
    return {record["step"]: record for record in read_metrics(folder.metrics) if "loss" in record}


def _last(records: list[dict[str, Any]], key: str) -> float | None:
    return next((record[key] for record in reversed(records) if isinstance(record.get(key), int | float)), None)
