"""Progress and result of tokenizing: a progress bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drumline.data import Progress as PrepareProgress
from drumline.data import ProgressCallback
from drumline.units import duration

STAGES = {
    "reading": "reading text",
    "learning": "training the tokenizer",
    "encoding": "encoding",
    "joining": "joining what is encoded",
    "packing": "packing",
}
_LINE_EVERY_S = 5.0

Show = Callable[[PrepareProgress, float], None]
"""Called with the progress and the seconds since its stage started."""


@contextmanager
def preparing() -> Iterator[ProgressCallback]:
    """A callback that shows the progress and the remaining time."""
    show_all = _plain_lines
    if sys.stdout and sys.stdout.isatty():
        from drumline.report.bars import preparing_bars as show_all
    with show_all() as show:
        began: dict[str, float] = {}

        def timed(progress: PrepareProgress) -> None:
            now = time.perf_counter()
            show(progress, now - began.setdefault(progress.stage, now))

        yield timed


@contextmanager
def _plain_lines() -> Iterator[Show]:
    """A line at the start of each stage and every few seconds."""
    phase, written_at = "", 0.0

    def show(progress: PrepareProgress, elapsed_s: float) -> None:
        nonlocal phase, written_at
        now = time.perf_counter()
        if _phase(progress) != phase or now - written_at >= _LINE_EVERY_S:
            phase, written_at = _phase(progress), now
            sys.stdout.write(_line(progress, elapsed_s) + "\n")
            sys.stdout.flush()

    yield show


def is_merging(progress: PrepareProgress) -> bool:
    """Whether all words are counted and pairs are being merged, for which the library reports no progress."""
    return progress.stage == "learning" and progress.bytes_done == progress.bytes_total


def _phase(progress: PrepareProgress) -> str:
    return STAGES[progress.stage] + (": merging pairs" if is_merging(progress) else "")


def _line(progress: PrepareProgress, elapsed_s: float) -> str:
    """encoding 312.0 of 604.0 MB, 52%, 1.1 MB/s of text, 4m25s left; without a total: the amount and speed"""
    done, total = progress.bytes_done, progress.bytes_total
    ends, new = bool(total) and not is_merging(progress), done - progress.bytes_before
    percent = [f"{100 * done // total}%"] if total and ends else []
    left = [f"{duration(elapsed_s * (total - done) / new)} left"] if total and ends and new > 0 else []
    return ", ".join((amount(progress), *percent, *speed(progress, elapsed_s), *left))


def amount(progress: PrepareProgress) -> str:
    if progress.bytes_total is None or is_merging(progress):
        return f"{_phase(progress)}, {progress.text_bytes / 1e6:.1f} MB of text"
    unit, size = ("MB", 1e6) if progress.bytes_total >= 1e6 else ("kB", 1e3)
    return f"{_phase(progress)} {progress.bytes_done / size:.1f} of {progress.bytes_total / size:.1f} {unit}"


def speed(progress: PrepareProgress, elapsed_s: float) -> list[str]:
    known = progress.text_bytes and elapsed_s and not is_merging(progress)
    return [f"{progress.text_bytes / 1e6 / elapsed_s:.1f} MB/s of text"] if known else []
