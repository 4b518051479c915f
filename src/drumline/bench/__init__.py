"""A config -> its throughput on this machine, its bottlenecks, and estimates for a run.

bench: runs the benchmark (config: its settings; workload: a run's steps, timed by part; ceilings: hardware limits;
memory: memory of a step, and the largest batch size that fits). report, plots: show the results. dry_run: prints the
resolved config and estimates (estimates: of memory; copies: those of saves and snapshots), without training. shortage:
a run that needs more memory than there is (lighter: settings with which it needs less).
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.bench.bench import Report, run_bench
    from drumline.bench.config import BenchConfig
    from drumline.bench.dry_run import describe
    from drumline.bench.plots import plot_bench
    from drumline.bench.report import (
        ALL_REDUCE_COLUMNS,
        PART_COLUMNS,
        TABLE_COLUMNS,
        all_reduce_rows,
        part_rows,
        summary,
        table_rows,
    )
    from drumline.bench.shortage import check_memory, explain_memory

__getattr__, __dir__, __all__ = public(__name__, __file__)
