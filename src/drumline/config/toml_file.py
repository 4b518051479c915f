"""Config files: read a TOML file, and list the differences between two configs. toml_text.py writes them.

A file has one table per section of TrainConfig; a setting may also stand at the top level, since names are unique.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from drumline.config.facts import names_with
from drumline.config.ranges import did_you_mean
from drumline.config.settings import TrainConfig, is_mix
from drumline.errors import ConfigError, UsageError


def sections() -> dict[str, list[str]]:
    """The settings of each section: {"optim": ["lr", ...], ...}."""
    return {name: [f.name for f in fields(kind)] for name, kind in get_type_hints(TrainConfig).items()}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, without their sections."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}", fix="check the path after --config"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}", fix="fix that line; docs/configuration.md has examples"
        ) from None
    known = sections()
    settings: dict[str, Any] = {}
    for key, value in tables.items():
        is_section = isinstance(value, dict) and key != "model_options"
        inside = value if is_section else {key: value}
        if key == "data" and is_section and {"mix", "stage"} & value.keys():
            from drumline.config.mixes import from_tables

            inside = from_tables(value, path)
        if is_section and key not in known:
            raise _unknown(path, f"[{key}]", key, list(known))
        names = known[key] if is_section else [name for section in known.values() for name in section]
        for name, setting in inside.items():
            if name not in names:
                raise _unknown(path, name, name, names)
            if name in settings:
                raise ConfigError(
                    f"{path} sets {name} twice, to {settings[name]} and to {setting}", fix="keep one of them"
                )
            settings[name] = _as_words(setting) if name == "model_options" else setting
    check_whole(settings, said=f"{path}: ")
    return settings


def whole_numbers() -> set[str]:
    """The settings that are whole numbers, or one of a few words."""
    hints = {name: hint for kind in get_type_hints(TrainConfig).values() for name, hint in get_type_hints(kind).items()}
    return {name for name, hint in hints.items() if int in (kinds := (hint, *get_args(hint))) and float not in kinds}


def check_whole(settings: Mapping[str, Any], *, said: str) -> None:
    """Refuse fractions for whole numbers. said: before the name of a setting, where it was found"""
    for name in sorted(whole_numbers() & settings.keys()):
        with suppress(ValueError):  # of what is no number, the parser says more
            value = str(settings[name])
            if not float(value).is_integer():
                raise UsageError(f"{said}{name} {value} would be rounded", fix="give a whole number")


def _as_words(options: dict[str, Any] | list[str]) -> list[str]:
    """The table [model_options], as its flags would give it."""
    from drumline.config.options import option_words

    return option_words(options) if isinstance(options, dict) else options


def _unknown(path: Path, shown: str, key: str, names: list[str]) -> UsageError:
    for section, settings in sections().items():
        if key in settings:
            return UsageError(f"{path} sets {shown} in the wrong section", fix=f"move it to [{section}]")
    fix = did_you_mean(key, names, otherwise=f"known here: {', '.join(names)}")
    return UsageError(f"{path} sets {shown}, which is not a setting", fix=fix)


def from_settings(settings: dict[str, Any]) -> TrainConfig:
    """A config from settings without sections, as from read_settings."""
    parts: dict[str, Any] = {}
    for section, kind in get_type_hints(TrainConfig).items():
        names = {f.name for f in fields(kind)}
        inside = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k in names}
        parts[section] = kind(**inside)
    return TrainConfig(**parts)


def differences(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that differ and may not change when a run is resumed: {name: (old, new)}."""
    free = names_with("may_change") - ({"train_data_path"} if _other_mix(old, new) else set())
    before, after = ({k: v for part in asdict(c).values() for k, v in part.items()} for c in (old, new))
    return {k: (before[k], after[k]) for k in before if before[k] != after[k] and k not in free}


def _other_mix(old: TrainConfig, new: TrainConfig) -> bool:
    """Whether the weights or amounts of a mix differ; where its folders are does not matter."""
    before, after = old.data.train_data_path, new.data.train_data_path
    if not is_mix(before) and not is_mix(after):
        return False
    from drumline.config.mixes import same_amounts

    return is_mix(before) != is_mix(after) or not same_amounts(before, after)
