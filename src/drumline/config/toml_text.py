"""A config as TOML, which toml_file.py reads back. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from drumline.config.settings import TrainConfig


def to_toml(config: TrainConfig) -> str:
    """The whole config as a TOML file that --config reads back to the same config."""
    lines: list[str] = []
    tables = asdict(config)
    options = tables["model"].pop("model_options")
    for section, settings in tables.items():
        lines.append(f"[{section}]")
        # TOML has no null: a setting that is None is left out, which reads back as None.
        lines += [f"{name} = {toml_value(value)}" for name, value in settings.items() if value is not None]
        lines.append("")
    if options:
        lines += ["[model_options]", *(word.replace("=", " = ", 1) for word in options), ""]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """A setting's value as TOML."""
    if isinstance(value, float):
        return repr(value)
    # Strings, numbers, booleans and arrays are the same in JSON and TOML, except for DEL, which TOML wants escaped.
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False).replace("\x7f", "\\u007f")
