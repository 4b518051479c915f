"""`package.module:name` in a setting: how users bring their own model, text source or record sink."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.errors import ConfigError

MOVED = {
    "drumline.fused_gpt": "drumline.kernels.gpt",
    "drumline.records": "drumline.report.records",
    "drumline.text": "drumline.data.sources",
    "drumline.text_files": "drumline.data.text_files",
    "drumline.trackers": "drumline.report.trackers",
}
"""Where modules are now that configs of earlier versions may name."""


def is_plugin(value: str) -> bool:
    """Whether a value has the form package.module:name."""
    module, colon, name = value.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_plugin(value: str) -> Callable[..., Any]:
    """The function or class that package.module:name names; modules in the current folder are found too."""
    if not is_plugin(value):
        raise ConfigError(f"{value!r} is not of the form package.module:name", fix="write it as my_module:my_function")
    module_name, _, name = value.partition(":")
    module_name = MOVED.get(module_name, module_name)
    _import_from_here()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{value}: the module {module_name} cannot be imported: {error}",
            fix="start in the folder that holds the module, or install its package",
        ) from error
    plugin = getattr(module, name, None)
    if not callable(plugin):
        what = "has no function" if plugin is None else "has something that is not a function under"
        near = difflib.get_close_matches(name, [key for key, each in vars(module).items() if callable(each)], n=1)
        raise ConfigError(
            f"{value}: the module {module_name} {what} {name}",
            fix=f"did you mean {module_name}:{near[0]}?" if near else "name a function or class of that module",
        )
    return plugin  # type: ignore[no-any-return]


def plugin_file(value: str) -> Path | None:
    """The file that holds a plugin's module, without importing it; None where there is none."""
    _import_from_here()
    with suppress(ImportError, ValueError):
        module_name = value.partition(":")[0]
        spec = importlib.util.find_spec(MOVED.get(module_name, module_name))
        return Path(spec.origin) if spec and spec.origin else None
    return None


def _import_from_here() -> None:
    """Let modules of the current folder be imported: `python -m` allows it, an installed command does not."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
