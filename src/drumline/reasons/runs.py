"""A run as a pure function: its config, data, checkpoints and records. Nothing here changes the run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from drumline.checkpoint import Checkpoint, checkpoint_paths, open_checkpoint
from drumline.config import TrainConfig, resolved
from drumline.data import Data, open_data
from drumline.errors import CheckpointError, ConfigError
from drumline.files import STORE, RunFolder, check_code, run_of, stored_config
from drumline.report import Record, training_records

COMPARED = ("loss", "grad_norm", "fingerprint")
"""What records of one step have in common if they are of the same computation."""


@dataclass(frozen=True)
class PureRun:
    """A run whose steps can be computed again."""

    folder: RunFolder
    config: TrainConfig
    total_steps: int
    detours: list[list[int]]
    """As in RunState, of all rollbacks so far."""

    def data_step(self, step: int) -> int:
        """The step whose data step `step`, counted from 0, uses."""
        return step + sum(left_out for since, left_out in self.detours if since <= step)

    def data(self) -> Data:
        return open_data(self.config, run=self.folder)

    def records(self) -> dict[int, Record]:
        """The records of training, by step."""
        return training_records(self.folder)

    def checkpoint_before(self, step: int) -> Checkpoint | None:
        """The newest valid checkpoint of a step before `step`."""
        for path in reversed(checkpoint_paths(self.folder.checkpoints)):
            if _step_of(path) < step:
                try:
                    found = open_checkpoint(path)
                except CheckpointError:
                    continue
                if len(found.state.detours) <= len(self.detours):  # else it is of after a rollback that is left out
                    return found
        return None

    def start(self, step: int, *, from_start: bool) -> Checkpoint | None:
        """Where to begin for step `step`: a checkpoint before it, or None for the initial weights, if allowed."""
        found = self.checkpoint_before(step)
        if found is not None:
            return found
        if self.config.model.init_from is not None:
            raise CheckpointError(
                f"{self.folder.path} has no valid checkpoint before step {step:,}, and began from "
                f"{self.config.model.init_from}",
                fix="choose a later step; steps saved: " + self.saved(),
            )
        if not from_start and step > 1:
            raise CheckpointError(
                f"{self.folder.path} has no valid checkpoint before step {step:,} (steps saved: {self.saved()})",
                fix=f"choose a later step, or add --from_start to compute all {step - 1:,} steps before it again",
            )
        return None

    def saved(self) -> str:
        return ", ".join(str(_step_of(path)) for path in checkpoint_paths(self.folder.checkpoints)) or "none"


def open_run(path: Path, *, trusts: bool) -> PureRun:
    """A run of `drumline train`, running or not."""
    folder = run_of(path)
    if folder.trainer.exists():
        raise ConfigError(
            f"{folder.path} was trained by a script with Trainer: only the script has its model and data, so its steps "
            "cannot be computed again",
            fix="use this with a run of drumline train",
        )
    stored = stored_config(folder)
    if stored is None:
        raise ConfigError(f"{path} is not a run", fix="`drumline runs` lists the runs here")
    settings = {name: value for part in asdict(stored).values() for name, value in part.items()}
    check_code({**settings, "sink": None, STORE: None}, folder.path, trusts=trusts)
    config, status = resolved(stored), folder.read_status()
    total_steps = stored.batch.total_steps or status.get("total_steps")
    if not total_steps or status.get("state") == "imported":
        raise ConfigError(
            f"{folder.path} has not been trained yet", fix="train it: drumline train --run_dir " + _q(path)
        )
    return PureRun(folder, config, int(total_steps), _detours(folder))


def with_rollbacks(run: PureRun, rollbacks: int | None) -> PureRun:
    """The run as it was after this many rollbacks; None: after all."""
    if rollbacks is not None and not 0 <= rollbacks <= len(run.detours):
        raise ConfigError(
            f"{run.folder.path} has {len(run.detours)} rollbacks, not {rollbacks}",
            fix="give --rollbacks a number up to that",
        )
    return run if rollbacks is None else replace(run, detours=run.detours[:rollbacks])


def check_step(run: PureRun, step: int) -> None:
    """Refuse a step that the run does not have."""
    if not 1 <= step <= run.total_steps:
        raise ConfigError(
            f"{run.folder.path} has no step {step:,}: its steps are 1 to {run.total_steps:,}",
            fix="give --step the number of a step, as records and log lines have it",
        )


def _detours(folder: RunFolder) -> list[list[int]]:
    """Of the newest checkpoint, and of rollbacks since it was saved or resumed from."""
    detours, since = list[list[int]](), None
    for path in reversed(checkpoint_paths(folder.checkpoints)):
        try:
            checkpoint = open_checkpoint(path, read=("run.json",))
            detours, since = [list(each) for each in checkpoint.state.detours], checkpoint.step
            break
        except CheckpointError:
            continue
    later: list[list[int]] = []
    for event in _events(folder.events):
        if event.get("event") in ("saved", "resumed") and event.get("step") == since:
            later = []
        elif event.get("event") == "rollback":
            later.append([int(event["to"]), int(event["left_out_steps"])])
    return detours + [each for each in later if each not in detours]


def _events(path: Path) -> list[dict[str, Any]]:
    events = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _q(path: Path) -> str:
    return quote(str(path))
