"""A run goes on with the global batch that it began with, divided among the ranks that there are now."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from drumline.data import BatchPlan
from drumline.errors import ConfigError
from drumline.files import RunFolder, is_unfinished, numbered_folders
from drumline.parallel import own_pulse
from drumline.trainer.sameness import ACCUMULATED, read_about, script_name

_OF_RANKS = "global_batch_size"
"""What another number of ranks makes of the same script."""


def stored_batch(run_dir: str | Path | None, about: dict[str, Any]) -> int | None:
    """The samples per step of the run that a script goes on with; None: there is none, or the script has changed.

    about: what the run is, with the batch size that this number of ranks would give it
    """
    about = json.loads(json.dumps(about))
    if run_dir is not None:
        stored = read_about(RunFolder(Path(run_dir))) or {}
        # Whatever else differs is refused by its own name.
        same = all(stored.get(name) == about[name] for name in ("batch_size", ACCUMULATED))
        return int(stored[_OF_RANKS]) if same else None
    folders = takewhile(lambda folder: folder.path.exists(), numbered_folders(script_name()))
    going_on = [folder for folder in folders if is_unfinished(folder) or own_pulse().started_again]
    abouts = [each for each in map(read_about, going_on) if each and {**each, _OF_RANKS: about[_OF_RANKS]} == about]
    batches = [int(each[_OF_RANKS]) for each in abouts]
    return about[_OF_RANKS] if about[_OF_RANKS] in batches else next(iter(batches), None)


def divided(samples: int, batch_size: int, *, ranks: int, bitwise: bool) -> BatchPlan:
    """A step of `samples` in micro-batches of `batch_size`, or smaller ones if there are fewer of those than ranks.

    Smaller ones have the same sum, but not to the last bit.
    """
    plan = BatchPlan(micro_batch_size=batch_size, micro_batches=samples // batch_size)
    if ranks <= plan.micro_batches or bitwise:
        return plan
    if samples % ranks:
        fitting = [n for n in range(1, samples + 1) if n <= plan.micro_batches or samples % n == 0]
        below, above = max(n for n in fitting if n < ranks), min((n for n in fitting if n > ranks), default=None)
        raise ConfigError(
            f"{ranks} ranks cannot share the {samples} samples per step that this run began with",
            fix=f"start {below}{f' or {above}' if above else ''} ranks, or choose another run_dir for a new run",
        )
    return BatchPlan(micro_batch_size=samples // ranks, micro_batches=ranks)
