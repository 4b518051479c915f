"""Settings that come from files: --config, and the run that is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts.config import Dict

from drumline.config import LENGTHS, flag, read_settings
from drumline.errors import ConfigError
from drumline.files import CODE, STORE, RunFolder, check_code, run_of, stored_settings
from drumline.stores import check_writable, is_store


def file_layers(words: Sequence[str]) -> list[Dict]:
    """Settings from files, in order of precedence: --config, then the run that is resumed."""
    files: list[tuple[Path | str, dict[str, Any]]] = []
    config = flag(words, "config")
    if config:
        files.append((Path(config), _settings(Path(config), words)))
    run_dir = flag(words, "run_dir") or (files[0][1].get("run_dir") if files else None)
    resume_from, init_from = flag(words, "resume_from"), flag(words, "init_from")
    if init_from is not None and resume_from not in (None, "auto"):
        raise ConfigError(
            f"--resume_from {resume_from} and --init_from {init_from} both say where to begin", fix="give one of them"
        )
    if run_dir and RunFolder(Path(run_dir)).trainer.exists():
        raise ConfigError(
            f"{run_dir} was trained by a script with Trainer",
            fix="start that script again, or choose another --run_dir",
        )
    stored = RunFolder(Path(run_dir)).config if run_dir else None
    is_new = stored is None or not stored.exists()
    store = flag(words, "checkpoint_store") or (files[0][1].get("checkpoint_store") if files else None)
    if is_new and is_store(resume_from or ""):
        files += _in_store(str(resume_from), words, *(given for _, given in files))
    elif is_new and store and (resume_from or "auto") in ("auto", *filter(str.isdigit, [resume_from or ""])):
        check_writable(store)
        files += _in_store(store, words, *(given for _, given in files))
    elif is_new and resume_from not in (None, "auto"):
        # A new run that starts from another one's checkpoint: RUN, or RUN/checkpoints/step-N.
        stored = run_of(Path(str(resume_from))).config
    if stored is not None and stored.exists():
        settings = stored_settings(RunFolder(stored.parent))
        settings.pop("run_dir", None)  # --run_dir, if given, is the same or names a new run
        if is_new:
            settings.pop(STORE, None)  # of the other run
        _check_code(settings, stored.parent, words, *(given for _, given in files))
        files.append((stored, settings))
    elif str(resume_from).endswith(".pt"):
        from drumline.checkpoint import carried

        settings = carried(Path(str(resume_from))).get("settings", {})
        settings.pop(STORE, None)
        _check_code(settings, Path(str(resume_from)), words, *(given for _, given in files))
        files.append((Path(str(resume_from)), settings))
    # A length given in one layer replaces another length from any lower layer.
    given = {name for name in LENGTHS if flag(words, name) is not None}
    for _, settings in files:
        lengths = {name for name in LENGTHS if name in settings}
        for name in lengths - given if given else ():
            del settings[name]
        given |= lengths
    return [Dict(settings, source=str(path), use_commands_as_keys=False) for path, settings in files]


def _check_code(settings: dict[str, Any], run: Path, words: Sequence[str], *files: dict[str, Any]) -> None:
    """Of a run: what it names may be known, trusted, or named by the user's own words and files as well."""
    given = [(flag(words, name), *(file.get(name) for file in files)) for name in (*CODE, STORE)]
    named = [value for values in given for value in values if value]
    check_code(settings, run, trusts=flag(words, "trust") is not None, named=named, can_name=True)


def _settings(path: Path, words: Sequence[str]) -> dict[str, Any]:
    """Of a file given with --config. That of a run is for a new run: it does not say which folder that takes."""
    run = RunFolder(path.parent)
    if path.name != run.config.name or not _is_run(run):
        return read_settings(path)
    settings = stored_settings(run)
    settings.pop("run_dir", None)
    settings.pop(STORE, None)
    _check_code(settings, run.path, words)
    return settings


def _in_store(url: str, words: Sequence[str], *files: dict[str, Any]) -> list[tuple[Path | str, dict[str, Any]]]:
    """The settings of a run in a store, if there is one: no more trusted than a folder from elsewhere."""
    from drumline.stores import stored_in

    settings = stored_in(url)
    if settings is None:
        return []
    place = Path(url)
    for name in ("run_dir", STORE):
        settings.pop(name, None)
    try:
        _check_code(settings, place, words, *files)
    except ConfigError as error:
        raise ConfigError(error.problem.replace(str(place), url), fix=error.fix) from None
    return [(url, settings)]


def _is_run(run: RunFolder) -> bool:
    return any(path.exists() for path in (run.data, run.identity, run.status, run.checkpoints, run.tokenizer))
