"""Progress bars for terminals: tokenizing text, training, and jobs of many pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from drumline.data import Progress as PrepareProgress
from drumline.report.preparation import STAGES, Show, amount, is_merging, speed

_MERGING = "merging pairs"
"""The part of training a tokenizer whose progress is unknown: a bar of its own, which only moves."""


class TrainingBar:
    """The steps of a run, below all that it prints."""

    def __init__(self, total_steps: int) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            transient=True,
        )
        self._task = self._bar.add_task("training", total=total_steps)
        self._bar.start()

    def at(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        with suppress(OSError, ValueError):  # the terminal is closed
            self._bar.stop()


@contextmanager
def preparing_bars() -> Iterator[Show]:
    """One bar per stage; they disappear at the end, when the result is printed."""
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    bars = Progress(*columns, transient=True)
    tasks: dict[str, TaskID] = {}

    def show(progress: PrepareProgress, elapsed_s: float) -> None:
        if not tasks:  # not before: tokens that exist are read without a bar
            bars.start()
        stage = _MERGING if is_merging(progress) else STAGES[progress.stage]
        if stage not in tasks:
            for before, ended in tasks.items():  # it may have finished before its estimate
                bars.update(ended, description=before, total=1, completed=1)
            tasks[stage] = bars.add_task("", total=None)
        bars.update(
            tasks[stage],
            description=", ".join((amount(progress), *speed(progress, elapsed_s))),
            completed=progress.bytes_done,
            total=None if is_merging(progress) else progress.bytes_total,
        )

    try:
        yield show
    finally:
        bars.stop()


@contextmanager
def counting_bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """On stderr, for a job of `total` pieces: a function to call after each."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
