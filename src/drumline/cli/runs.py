"""`drumline runs`: the runs in a folder."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def runs(where: Path = Path("runs"), /, *, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """List runs with their state, latest losses, and the share of time that saves and snapshots held them up.

    Parameters
    ----------
    where
        Folder that contains the runs.
    json
        Print JSON.
    """
    from drumline.errors import ConfigError
    from drumline.report import list_runs, print_runs

    if not where.is_dir() and where != Path("runs"):  # without any run, there is no folder of runs yet
        problem = "is not a folder" if where.exists() else "does not exist"
        raise ConfigError(f"{where} {problem}", fix="give the folder that contains the runs; default: runs")
    rows = list(list_runs(where))
    if json:
        print(json_format.dumps(rows, indent=2))
    else:
        print_runs(rows, where)
    return 0
