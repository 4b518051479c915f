"""Records -> console, metrics.jsonl, trackers, plots."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.report.plots import plot_bench as plot_bench
    from drumline.report.plots import plot_loss as plot_loss
    from drumline.report.records import JsonlSink as JsonlSink
    from drumline.report.records import Record as Record
    from drumline.report.records import Records as Records
    from drumline.report.records import Sink as Sink
    from drumline.report.records import Speed as Speed
    from drumline.report.records import flush_console as flush_console
    from drumline.report.records import forget_after as forget_after
    from drumline.report.records import tell as tell
    from drumline.report.runs import list_runs as list_runs
    from drumline.report.terminal import prepared_lines as prepared_lines
    from drumline.report.terminal import preparing as preparing
    from drumline.report.terminal import print_checkpoints as print_checkpoints
    from drumline.report.terminal import print_line as print_line
    from drumline.report.terminal import print_runs as print_runs
    from drumline.report.terminal import print_table as print_table
    from drumline.report.trackers import open_trackers as open_trackers

__getattr__, __dir__, __all__ = public(__name__, __file__)
