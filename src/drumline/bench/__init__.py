"""A config -> how fast it trains here, what limits it, and what a run would take.

bench: measures and sums up (config: its settings; workload: a run's steps, timed by part; ceilings: what the hardware
can do; memory: what a step takes, and the largest batch that fits). report, plots: the figures shown. dry_run: the
resolved config and estimates, without training.
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

__getattr__, __dir__, __all__ = public(__name__, __file__)
