"""How far a long job is: a bar on a terminal, else a line every few seconds. On stderr: stdout has the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drumline.units import duration

_LINE_EVERY_S = 5.0


@contextmanager
def progress_of(what: str, *, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` pieces of a job."""
    show = _lines
    if sys.stderr.isatty():
        from drumline.report.bars import counting_bar as show
    with show(what, total) as piece_done:
        yield piece_done


@contextmanager
def _lines(what: str, total: int) -> Iterator[Callable[[], None]]:
    began_s = shown_s = time.perf_counter()
    done = 0

    def piece_done() -> None:
        nonlocal done, shown_s
        done += 1
        now_s = time.perf_counter()
        if now_s - shown_s >= _LINE_EVERY_S and done < total:
            shown_s = now_s
            left = duration((now_s - began_s) * (total - done) / done)
            sys.stderr.write(f"{what} {done:,} of {total:,}, {100 * done // total}%, {left} left\n")
            sys.stderr.flush()

    yield piece_done
