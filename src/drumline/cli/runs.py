"""`drumline runs`: the runs in a folder."""

from __future__ import annotations

from pathlib import Path


def runs(where: Path = Path("runs"), /) -> int:
    """List runs with their state and latest losses.

    Parameters
    ----------
    where
        Folder that contains the runs.
    """
    from drumline.report import list_runs, print_runs

    print_runs(list(list_runs(where)), where)
    return 0
