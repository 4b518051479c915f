"""Records -> console, metrics.jsonl, trackers, plots."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.report.commands import command
    from drumline.report.errors import is_to_tell, report_error, tell
    from drumline.report.lanes import write_lanes
    from drumline.report.plots import plot_curves, save_figure
    from drumline.report.preparation import preparing
    from drumline.report.progress import progress_of
    from drumline.report.records import (
        FORMATS,
        JsonlSink,
        Record,
        Records,
        Sink,
        Sparing,
        Speed,
        flush_console,
        to_stderr,
    )
    from drumline.report.rewinding import forget_after
    from drumline.report.runs import last_records, list_runs, training_records
    from drumline.report.terminal import follow_runs, print_checkpoints, print_line, print_runs, print_table
    from drumline.report.trackers import add_trackers, open_trackers, with_epochs

__getattr__, __dir__, __all__ = public(__name__, __file__)
