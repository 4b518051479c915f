"""The config of a resumed run: what it takes from the stored one, and what may not differ. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from drumline.config.ranges import did_you_mean
from drumline.config.settings import BatchConfig, TrainConfig
from drumline.config.toml_file import differences, sections
from drumline.errors import ConfigError


def check_allowed(names: Iterable[str]) -> None:
    """Refuse unknown names in --allow_change."""
    known = [name for section in sections().values() for name in section]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--allow_change {name} is not a setting",
                fix=did_you_mean(name, known, otherwise="use the name of a flag, without the dashes"),
            )


def with_stored_batch(batch: BatchConfig, stored: BatchConfig) -> BatchConfig:
    """The batch of a resumed run: sequences per step stay the same on any number of ranks."""
    if batch.global_batch_size not in (None, stored.global_batch_size):
        return batch
    return replace(
        batch,
        gradient_accumulation_steps=None,
        global_batch_size=stored.global_batch_size,
        batch_size=batch.batch_size or stored.batch_size,
    )


def refuse_changes(config: TrainConfig, stored: TrainConfig, *, run_dir: Path) -> None:
    """Refuse to resume a run with settings that change what a step computes, except those in --allow_change."""
    changed = differences(stored, config)
    refused = {name: values for name, values in changed.items() if name not in config.run.allow_change}
    if refused:
        listed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in refused.items())
        allow = " ".join(f"--allow_change {name}" for name in refused)
        raise ConfigError(
            f"{run_dir} was started with different settings: {listed}",
            fix=f"choose another --run_dir for a new run, or add {allow} to change this one",
        )
