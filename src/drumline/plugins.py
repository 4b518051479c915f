"""`package.module:name` in a setting: custom models, optimizers, data sources and loggers."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.errors import ConfigError

MOVED = {
    "drumline.fused_gpt": "drumline.kernels.gpt",
    "drumline.records": "drumline.report.records",
    "drumline.text": "drumline.data.sources",
    "drumline.text_files": "drumline.data.sources",
    "drumline.trackers": "drumline.report.trackers",
}
"""New locations of modules that configs of earlier versions may refer to."""


def is_plugin(value: str) -> bool:
    """Whether a value has the form package.module:name."""
    module, colon, name = value.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def check_form(what: str, value: str, *, known: Sequence[str]) -> None:
    """Refuse a value that is neither of that form nor one of drumline's own."""
    if not is_plugin(value):
        near = difflib.get_close_matches(value, known, n=1)
        listed = f"choose one of {', '.join(known)}, or package.module:name of a function"
        raise ConfigError(f"there is no {what} {value!r}", fix=f"did you mean {near[0]}?" if near else listed)


def load_plugin(value: str) -> Callable[..., Any]:
    """The function or class package.module:name; modules in the current folder are found too."""
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
            fix="start in the folder of the module, or install its package",
        ) from error
    plugin = getattr(module, name, None)
    if not callable(plugin):
        what = "has no function" if plugin is None else "has something that is not a function under"
        near = difflib.get_close_matches(name, [key for key, each in vars(module).items() if callable(each)], n=1)
        raise ConfigError(
            f"{value}: the module {module_name} {what} {name}",
            fix=f"did you mean {module_name}:{near[0]}?" if near else "use a function or class of that module",
        )
    remember(value, getattr(module, "__file__", None))
    return plugin  # type: ignore[no-any-return]


def was_used(value: str, file: str | None) -> bool:
    """Whether this user has used this plugin, of this file, before on this machine."""
    try:
        found = _used().lstat()
        ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
        return ours and _line(value, file) in _used().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return False


def remember(value: str, file: str | None) -> None:
    """A run's config may name it from now on (`files.check_code`): a plugin, or a store, which has no file."""
    if was_used(value, file):
        return
    with suppress(OSError):  # a home that cannot be written: the user will be asked
        _used().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(_used(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, f"{_line(value, file)}\n".encode())  # one call, so that lines of ranks do not mix
        finally:
            os.close(descriptor)


def _used() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "drumline/plugins"


def _line(value: str, file: str | None) -> str:
    return json.dumps([value, os.path.realpath(file) if file else None])


def check_call(value: str, plugin: Callable[..., Any], *given: Any, flag: str, options: Mapping[str, Any]) -> None:
    """Refuse options that a plugin has no parameter for, and a call without a required option.

    given: its other arguments; flag: the setting that the options come from
    """
    try:
        signature = inspect.signature(plugin)
    except ValueError:
        return  # a built-in without a signature
    try:
        signature.bind(*given, **options)
        return
    except TypeError:
        names = list(signature.parameters)[len(given) :]
    unknown = [name for name in options if name not in names]
    listed = f"its options: {', '.join(names)}" if names else f"drop --{flag}"
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=1)
        fix = f"did you mean {near[0]}? {listed}" if near else listed
        raise ConfigError(f"{value} has no option {unknown[0]}", fix=fix)
    needed = [name for name in names if signature.parameters[name].default is inspect.Parameter.empty]
    missing = ", ".join(name for name in needed if name not in options)
    raise ConfigError(f"{value} requires {missing}", fix=f"add --{flag} NAME=VALUE for each")


def plugin_file(value: str) -> Path | None:
    """The file of a plugin's module, without importing it; None if unknown."""
    _import_from_here()
    with suppress(ImportError, ValueError):
        module_name = value.partition(":")[0]
        spec = importlib.util.find_spec(MOVED.get(module_name, module_name))
        if spec and spec.origin:
            remember(value, spec.origin)
            return Path(spec.origin)
    return None


def _import_from_here() -> None:
    """Make modules in the current folder importable: `python -m` does that, an installed command does not."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
