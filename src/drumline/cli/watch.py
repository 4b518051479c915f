"""`drumline watch` and `drumline report`: a page of runs, live, and one file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from drumline.errors import ConfigError


def watch(where: Path = Path("runs"), /, *, host: str = "127.0.0.1", port: int | None = None) -> int:
    """Serve a page of a run, or of all runs in a folder, and keep it up to date.

    Reads nothing but run folders: also those that are finished, lost or copied from another machine.

    Parameters
    ----------
    where
        Run folder, or folder that contains runs.
    host
        Address to listen at. At any but a loopback address, the page needs the token in the address that is printed.
    port
        Port to listen at; 0: any that is free. Default: the first free one from 6240 on.
    """
    from drumline.watch import WatchConfig, serve_page

    if not where.exists() and where != Path("runs"):  # without any run, there is no folder of runs yet
        raise ConfigError(f"{where} does not exist", fix="give a run folder, or the folder that contains the runs")
    serve_page(where, WatchConfig(host=host, port=port), say=lambda line: print(line, flush=True))
    return 0


def report(
    run: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    format: Literal["html", "png"] = "html",
) -> int:
    """Write one file about a run: curves, config, events, samples, and how to make it again.

    Parameters
    ----------
    run
        Run folder.
    out
        File to write. Default: report.html or report.png in the run folder.
    format
        html: a page that needs no network. png: the curves.
    """
    from drumline.watch import write_png, write_report

    written = write_png(run, out) if format == "png" else write_report(run, out)
    print(f"wrote {written}")
    return 0
