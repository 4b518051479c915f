"""How far preparing text is, and what it made: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from drumline.data import Prepared, ProgressCallback
from drumline.data import Progress as PrepareProgress
from drumline.units import duration

_STAGES = {"reading": "reading text", "learning": "learning a vocabulary", "encoding": "encoding"}
_LINE_EVERY_S = 5.0

_Show = Callable[[PrepareProgress, float], None]
"""Called with the progress and the seconds since its stage began."""


@contextmanager
def preparing() -> Iterator[ProgressCallback]:
    """A callback that shows how much is done of how much, and when it will end."""
    with _bars() if sys.stdout and sys.stdout.isatty() else _plain_lines() as show:
        began: dict[str, float] = {}

        def timed(progress: PrepareProgress) -> None:
            now = time.perf_counter()
            show(progress, now - began.setdefault(progress.stage, now))

        yield timed


@contextmanager
def _plain_lines() -> Iterator[_Show]:
    """A line at the beginning of each phase and every few seconds."""
    phase, written_at = "", 0.0

    def show(progress: PrepareProgress, elapsed_s: float) -> None:
        nonlocal phase, written_at
        now = time.perf_counter()
        if _phase(progress) != phase or now - written_at >= _LINE_EVERY_S:
            phase, written_at = _phase(progress), now
            sys.stdout.write(_line(progress, elapsed_s) + "\n")
            sys.stdout.flush()

    yield show


@contextmanager
def _bars() -> Iterator[_Show]:
    """One bar for each stage; they vanish at the end, when the result is printed."""
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def show(progress: PrepareProgress, elapsed_s: float) -> None:
            if progress.stage not in tasks:
                for stage, ended in tasks.items():  # it may have ended before its estimate
                    bars.update(ended, description=_STAGES[stage], total=1, completed=1)
                tasks[progress.stage] = bars.add_task("", total=None)
            bars.update(
                tasks[progress.stage],
                description=", ".join((_amount(progress), *_speed(progress, elapsed_s))),
                completed=progress.bytes_done,
                total=None if _is_merging(progress) else progress.bytes_total,
            )

        yield show


def _is_merging(progress: PrepareProgress) -> bool:
    """Whether all words are counted and pairs are being merged, of which the library reports no progress."""
    return progress.stage == "learning" and progress.bytes_done == progress.bytes_total


def _phase(progress: PrepareProgress) -> str:
    stage = _STAGES[progress.stage]
    return f"{stage}: merging pairs" if _is_merging(progress) else stage


def _line(progress: PrepareProgress, elapsed_s: float) -> str:
    """encoding 312.0 of 604.0 MB, 52%, 1.1 MB/s of text, 4m25s left; without a total: what was done and how fast"""
    done, total = progress.bytes_done, progress.bytes_total
    ends = bool(total) and not _is_merging(progress)
    percent = [f"{100 * done // total}%"] if total and ends else []
    left = [f"{duration(elapsed_s * (total - done) / done)} left"] if total and ends and done else []
    return ", ".join((_amount(progress), *percent, *_speed(progress, elapsed_s), *left))


def _amount(progress: PrepareProgress) -> str:
    if progress.bytes_total is None or _is_merging(progress):
        return f"{_phase(progress)}, {progress.text_bytes / 1e6:.1f} MB of text"
    return f"{_phase(progress)} {progress.bytes_done / 1e6:.1f} of {progress.bytes_total / 1e6:.1f} MB"


def _speed(progress: PrepareProgress, elapsed_s: float) -> list[str]:
    if not progress.text_bytes or not elapsed_s or _is_merging(progress):
        return []
    return [f"{progress.text_bytes / 1e6 / elapsed_s:.1f} MB/s of text"]


def prepared_lines(made: Prepared) -> list[str]:
    """What `prepare` made, for people."""
    text_mb = sum(split.text_bytes for split in made.manifest.splits.values()) / 1e6
    how = f"{text_mb:.1f} MB of text in {made.seconds:.1f} s ({text_mb / made.seconds:.1f} MB/s)"
    how = "there already" if made.reused else how
    lines = [f"{made.path}: {how}, vocabulary {made.manifest.vocab_size:,}"]
    for name, split in made.manifest.splits.items():
        lines.append(f"  {name}.bin   {split.tokens:,} tokens of {split.documents:,} documents")
    if made.skipped.count:
        lines.append(f"skipped {made.skipped.count} unreadable; the first: {'; '.join(made.skipped.first)}")
    return lines
