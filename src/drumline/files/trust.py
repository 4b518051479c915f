"""Which code and which store the config of a run may name: what this user has used before here, or says it trusts.

A run folder may come from anywhere, and its config names functions (`package.module:name`) that would be imported and
called. Functions that a user has named on a command line, in a script or in a config file of their own are remembered
with their file, outside of all run folders (`plugins.was_used`), and a run's config may name those. Others need --trust
and must be installed: the current folder and those that the run is in are no places to take a stranger's module from.
A store that a run uploads its checkpoints to is remembered and asked for in the same way.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from drumline.errors import ConfigError
from drumline.plugins import MOVED, is_plugin, was_used

DATA = ("train_data_path", "valid_data_path")
CODE = ("model", "optimizer", "sink", *DATA)
"""Settings that may name a function."""
STORE = "checkpoint_store"


def check_code(
    settings: Mapping[str, Any], run: Path, *, trusts: bool, named: Sequence[str] = (), can_name: bool = False
) -> None:
    """Refuse functions that a run's config names, unless they are known here or trusted.

    named:    those that the user names on the command line as well
    can_name: whether the command has flags for them
    """
    for setting in CODE:
        value = settings.get(setting)
        is_file = setting in DATA and os.path.exists(str(value))
        if isinstance(value, str) and is_plugin(value) and value not in named and not is_file:
            _check(setting, value, run, trusts=trusts, can_name=can_name)
    store = settings.get(STORE)
    if store and not trusts and store not in named and not was_used(str(store), None):
        raise ConfigError(
            f"{run} would upload its checkpoints to {store}, a store that you have not used here before",
            fix=f"if that is yours, name it yourself: --{STORE} {store}",
        )


def _check(setting: str, value: str, run: Path, *, trusts: bool, can_name: bool) -> None:
    module = value.partition(":")[0]
    if module in (*MOVED, *MOVED.values()):
        return  # drumline's own
    here = os.getcwd()
    file = _file(module, sys.path if {"", here} & set(sys.path) else [here, *sys.path])
    if was_used(value, file):
        return
    myself = f"; or name it yourself: --{setting} {value}" if can_name else ""
    if not trusts:
        raise ConfigError(
            f"{run} names code that you have not used here before: {setting} {value}, {_place(module, file)}",
            fix=f"if you trust it and {module} is installed, add --trust{myself}",
        )
    if file is None or file != _file(module, _installed(run)):
        raise ConfigError(
            f"{run} names code that is not installed: {setting} {value}, {_place(module, file)}",
            fix=f"install its package, or set PYTHONPATH to its folder, and add --trust{myself}",
        )


def _place(module: str, file: str | None) -> str:
    return f"in {file}" if file else f"but there is no module {module}"


def _installed(run: Path) -> list[str]:
    """Where modules are found without the current folder and those that the run is in, unless PYTHONPATH has them."""
    given = {os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path}
    around = {os.getcwd(), *(str(path) for path in (run.absolute(), *run.absolute().parents, *run.resolve().parents))}
    return [path for path in sys.path if os.path.abspath(path) in given or os.path.abspath(path) not in around]


def _file(module: str, paths: Sequence[str]) -> str | None:
    """The file of a module that is looked for in these folders, without running any of its packages."""
    where: Sequence[str] | None = paths
    spec, parts = None, module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if where is None:
            return None
        spec = PathFinder.find_spec(name, where)
        if spec is None and count == 1:  # built in, or of a package that was installed to be edited
            others = [finder for finder in sys.meta_path if finder is not PathFinder and hasattr(finder, "find_spec")]
            spec = next((found for finder in others if (found := finder.find_spec(name, None))), None)
        if spec is None:
            return None
        where = spec.submodule_search_locations
    return spec.origin if spec else None
