"""Progress bars for terminals: tokenizing text, training, and jobs of many pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, RenderableType
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
from rich.text import Text

from drumline.data import Progress as PrepareProgress
from drumline.report.preparation import STAGES, Show, amount, is_merging, speed
from drumline.units import count, counted

_MERGING = "merging pairs"
"""The part of training a tokenizer whose progress is unknown: a bar of its own, which only moves."""


class TrainingBar:
    """The steps of a run and how it stands, below all that it prints."""

    def __init__(self, total_steps: int) -> None:
        self._bar = _Bar(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            transient=True,
        )
        self._task = self._bar.add_task("training", total=total_steps)
        self._losses: list[float] = []
        self._shown: dict[str, str] = {}
        self._bar.start()

    def at(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def show(self, facts: Mapping[str, Any]) -> None:
        """A record, or an event of the run."""
        if isinstance(loss := facts.get("loss"), float) and math.isfinite(loss) and "event" not in facts:
            self._losses = [*self._losses[-_KEPT:], loss]
            self._shown["loss"] = f"loss {loss:.4f} {sparkline(self._losses)}"
        self._shown |= {key: form(facts) for key, form in _STANDS.items() if facts.get(key) is not None}
        if facts.get("event") in _EVENTS:
            self._shown[_EVENTS[facts["event"]][0]] = _EVENTS[facts["event"]][1](facts)
        order = ("loss", *_STANDS, *(place for place, _ in _EVENTS.values()))
        self._bar.state = "  ".join(self._shown[key] for key in dict.fromkeys(order) if key in self._shown)

    def print(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        with suppress(OSError, ValueError):  # the terminal is closed
            self._bar.stop()


_STANDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "valid_loss": lambda facts: f"validation {facts['valid_loss']:.4f}",
    "tokens_per_s": lambda facts: f"{count(facts['tokens_per_s'])} tok/s",
    "samples_per_s": lambda facts: f"{count(facts['samples_per_s'])} samples/s",
    "mfu": lambda facts: f"mfu {facts['mfu']:.1%}",
    "peak_memory_bytes": lambda facts: f"{facts['peak_memory_bytes'] / (1 << 30):.1f} GiB",
}
"""What the line below the bar shows of records."""


def _ranks(facts: Mapping[str, Any]) -> str:
    hosts = len(set(facts["hosts"]))
    return f"{counted(facts['world_size'], 'rank')} on {counted(hosts, 'host')}"


_EVENTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "saved": ("saved", lambda facts: f"saved at {facts['step']:,}"),
    "started": ("ranks", _ranks),
    "resumed": ("ranks", _ranks),
}
"""And of events: where it is shown, and how."""
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH, _KEPT = 24, 2400
"""Characters of the curve, and the records that it shows at most: the newest."""


def sparkline(values: Sequence[float], *, width: int = _WIDTH) -> str:
    """A curve in one line: the mean of each of `width` parts, from the smallest to the largest."""
    parts = [values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)]
    means = [sum(part) / len(part) for part in parts if part]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


class _Bar(Progress):
    """A bar with a line below it, which is cut at the end of the terminal's."""

    state = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.state:
            yield Text(self.state, style="dim", no_wrap=True, overflow="ellipsis")


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
