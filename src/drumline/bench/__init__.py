"""A config -> how fast it trains here, what limits it, and what a run would take."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.bench.bench import Report as Report
    from drumline.bench.bench import run_bench as run_bench
    from drumline.bench.config import BenchConfig as BenchConfig
    from drumline.bench.dry_run import describe as describe
    from drumline.bench.report import ALL_REDUCE_COLUMNS as ALL_REDUCE_COLUMNS
    from drumline.bench.report import PART_COLUMNS as PART_COLUMNS
    from drumline.bench.report import TABLE_COLUMNS as TABLE_COLUMNS
    from drumline.bench.report import all_reduce_rows as all_reduce_rows
    from drumline.bench.report import part_rows as part_rows
    from drumline.bench.report import summary as summary
    from drumline.bench.report import table_rows as table_rows

__getattr__, __dir__, __all__ = public(__name__, __file__)
