"""Run folders -> a page, and a report.

lines, columns, ranks, events, samples: the files of a run, read as they grow. thinning: many records -> few points with
every extreme. goodput: where the time of a run went. cards: its config, data and model. source, library: one run, and
all runs of a folder. http, server: the page, for this machine. starting: that of `train --watch`. report_file: the same
page as one file. Nothing here imports torch, or writes into a run folder but the report.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.watch.library import Library
    from drumline.watch.report_file import write_png, write_report
    from drumline.watch.server import WatchConfig, serve_page
    from drumline.watch.source import RunSource
    from drumline.watch.starting import serve_beside, start_page

__getattr__, __dir__, __all__ = public(__name__, __file__)
