"""Settings that come from files: --config, and the run that is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts.config import Dict

from drumline.config import LENGTHS, flag, read_settings
from drumline.errors import ConfigError
from drumline.files import RunFolder, run_of, stored_settings


def file_layers(words: Sequence[str]) -> list[Dict]:
    """Settings from files, in order of precedence: --config, then the run that is resumed."""
    files: list[tuple[Path, dict[str, Any]]] = []
    config = flag(words, "config")
    if config:
        files.append((Path(config), _settings(Path(config))))
    run_dir = flag(words, "run_dir") or (files[0][1].get("run_dir") if files else None)
    resume_from = flag(words, "resume_from")
    if run_dir and RunFolder(Path(run_dir)).trainer.exists():
        raise ConfigError(
            f"{run_dir} was trained by a script with Trainer",
            fix="start that script again, or choose another --run_dir",
        )
    stored = RunFolder(Path(run_dir)).config if run_dir else None
    if (stored is None or not stored.exists()) and resume_from not in (None, "auto"):
        # A new run that starts from another one's checkpoint: RUN, or RUN/checkpoints/step-N.
        stored = run_of(Path(str(resume_from))).config
    if stored is not None and stored.exists():
        settings = stored_settings(RunFolder(stored.parent))
        settings.pop("run_dir", None)  # --run_dir, if given, is the same or names a new run
        files.append((stored, settings))
    elif str(resume_from).endswith(".pt"):
        from drumline.checkpoint import carried

        files.append((Path(str(resume_from)), carried(Path(str(resume_from))).get("settings", {})))
    # A length given in one layer replaces another length from any lower layer.
    given = {name for name in LENGTHS if flag(words, name) is not None}
    for _, settings in files:
        lengths = {name for name in LENGTHS if name in settings}
        for name in lengths - given if given else ():
            del settings[name]
        given |= lengths
    return [Dict(settings, source=str(path), use_commands_as_keys=False) for path, settings in files]


def _settings(path: Path) -> dict[str, Any]:
    """Of a file given with --config. That of a run is for a new run: it does not say which folder that takes."""
    run = RunFolder(path.parent)
    if path.name != run.config.name or not run.data.exists():
        return read_settings(path)
    settings = stored_settings(run)
    settings.pop("run_dir", None)
    return settings
