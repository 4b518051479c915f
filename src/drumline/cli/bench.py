"""`drumline bench` and `drumline drill`: measure this machine, and what a run on it withstands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from drumline.bench import BenchConfig
from drumline.errors import EXIT_FAILED, EXIT_INTERRUPTED, DrumlineError

if TYPE_CHECKING:
    from drumline.bench import Report
    from drumline.config import TrainConfig

_DEFAULTS = BenchConfig()


def bench(*, config: Annotated[BenchConfig, Parameter(name="*")] = _DEFAULTS) -> int:
    """Measure training throughput, where step time goes, and the largest batch that fits."""
    # Must be set before torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from drumline.cli.train import ranks_to_start

    if not (nproc := ranks_to_start(config.as_training(config.preset or "modern-tiny"))):
        bench_here(config)
        return 0
    from drumline.elastic import start_ranks

    code = start_ranks(bench_here, (config,), nproc=nproc)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return code


def bench_here(config: BenchConfig) -> None:
    """Measure in this process, alone or as one of the ranks; rank 0 prints the results."""
    from drumline.bench import run_bench
    from drumline.parallel import join, leave
    from drumline.report import print_line

    world = join(device=config.device, backend=config.backend)
    try:
        report = run_bench(config, world, say=print_line if world.is_rank0 else lambda text: None)
        if world.is_rank0:
            _show(report)
            _write(report, config)
    except DrumlineError as error:
        error.reported = error.reported or not world.is_rank0  # all ranks raise the same errors
        raise
    finally:
        leave()


def _write(report: Report, config: BenchConfig) -> None:
    """Write the requested output files."""
    from drumline.bench import plot_bench
    from drumline.files import replace_text
    from drumline.report import print_line

    writers: list[tuple[Path | None, Callable[[Path], None]]] = [
        (config.json, lambda path: replace_text(path, json.dumps(report.as_dict(), indent=2) + "\n")),
        (config.plot, lambda path: plot_bench(report.as_dict(), path)),
    ]
    for path, write in writers:
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise DrumlineError(f"cannot write {path}: {error.strerror}", fix="choose another folder") from None
        print_line(f"wrote {path}")


def _show(report: Report) -> None:
    from drumline.bench import (
        ALL_REDUCE_COLUMNS,
        PART_COLUMNS,
        TABLE_COLUMNS,
        all_reduce_rows,
        part_rows,
        summary,
        table_rows,
    )
    from drumline.report import print_line, print_table

    print_line("")
    print_line("\n".join(summary(report)))
    print_line("")
    print_table(PART_COLUMNS, part_rows(report))
    print_line("")
    if report.all_reduce:
        print_table(ALL_REDUCE_COLUMNS, all_reduce_rows(report))
        print_line("")
    if report.table:
        print_table(TABLE_COLUMNS, table_rows(report))


def print_dry_run(config: TrainConfig, *, nproc: int) -> int:
    """`train --dry_run`: the config on stdout, to redirect to a file, estimates on stderr; returns the exit code."""
    from drumline.bench import describe

    toml, estimates = describe(config, nproc=nproc)
    print(toml)
    print(estimates, file=sys.stderr)
    return 0


def drill(
    *,
    faults: str = "kill,crash,stop,term,disk,corrupt,nan,host",
    minutes: float = 2.0,
    ranks: int = 2,
    shard: Literal["none", "full"] = "none",
    seed: int = 0,
    folder: Path = Path("runs/drill"),
) -> int:
    """Inject faults into a small run repeatedly and verify that no work is lost.

    Parameters
    ----------
    faults
        Faults to inject, as kill,nan. stop freezes a rank, term sends SIGTERM, host kills a host.
    minutes
        Duration, not counting the reference run without faults.
    ranks
        Number of ranks.
    shard
        Spread the weights over the ranks, as train --shard full does; the run without faults is a single process.
    seed
        Random seed; the same seed injects the same faults.
    folder
        Folder for the runs and for drill.json, the results.
    """
    from drumline.drill import COLUMNS, DrillConfig, conclusion, fault_rows, parse_faults, run_drill
    from drumline.report import print_table

    config = DrillConfig(
        faults=parse_faults(faults), minutes=minutes, ranks=ranks, shard=shard, seed=seed, folder=folder
    )
    report = run_drill(config, say=lambda text: print(text, flush=True))
    print_table(COLUMNS, fault_rows(report))
    print("\n".join(conclusion(report)))
    return 0 if report.passed else EXIT_FAILED
