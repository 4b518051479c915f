"""What the terminal shows beside records: how far preparing is, what it made, tables of runs and checkpoints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from drumline.data import Prepared, ProgressCallback
from drumline.data import Progress as PrepareProgress
from drumline.units import count

if TYPE_CHECKING:  # it has torch, which the other tables do without
    from drumline.checkpoint import Listed

_STAGES = {"reading": "reading text", "learning": "learning a vocabulary", "encoding": "encoding"}
_PLAIN_EVERY_S = 5.0


@contextmanager
def preparing() -> Iterator[ProgressCallback]:
    """A callback that draws a bar on a terminal, and elsewhere writes a line now and then."""
    if not sys.stdout.isatty():
        yield _plain_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, transient=True) as bar:
        stages: dict[str, tuple[TaskID, float]] = {}

        def show(progress: PrepareProgress) -> None:
            if progress.stage not in stages:
                task = bar.add_task(_STAGES[progress.stage], total=progress.bytes_total, speed="")
                stages[progress.stage] = (task, time.perf_counter())
            task, since = stages[progress.stage]
            done = min(progress.bytes_done, progress.bytes_total or progress.bytes_done)
            bar.update(task, completed=done, speed=_speed(progress, since))

        yield show


def _plain_lines() -> ProgressCallback:
    since: dict[str, float] = {}
    said = 0.0

    def show(progress: PrepareProgress) -> None:
        nonlocal said
        now = time.perf_counter()
        first = since.setdefault(progress.stage, now)
        if now - said > _PLAIN_EVERY_S:
            said = now
            sys.stdout.write(f"{_STAGES[progress.stage]} {_speed(progress, first)}".rstrip() + "\n")
            sys.stdout.flush()

    return show


def _speed(progress: PrepareProgress, since: float) -> str:
    megabytes = progress.text_bytes / 1e6
    if progress.stage == "learning" or not megabytes:
        return ""
    return f"{megabytes:.0f} MB, {megabytes / max(0.05, time.perf_counter() - since):.1f} MB/s"


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


def print_runs(rows: Sequence[dict[str, Any]], where: Path) -> None:
    """One line per run."""
    console = Console()
    if not rows:
        console.print(f"no runs in {where}; `drumline train` makes one", highlight=False)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("run", "state", "step", "loss", "held out", "bits/byte", "updated"):
        table.add_column(column, justify="left" if column in ("run", "state", "updated") else "right", no_wrap=True)
    for row in rows:
        losses = (row[key] for key in ("loss", "valid_loss", "bits_per_byte"))
        numbers = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
        when = str(row["updated"])[:16].replace("T", " ")
        table.add_row(row["run"], row["state"], f"{row['step']:,}/{row['total_steps']:,}", *numbers, when)
    console.print(table)
    for row in rows:
        if row["cause"]:
            console.print(f"{row['run']}: {row['cause']}", highlight=False, markup=False)


def print_checkpoints(rows: Sequence[Listed]) -> None:
    """One line per checkpoint."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("step", "saved", "size", "held out", "kept because"):
        table.add_column(column, justify="left" if column in ("saved", "kept because") else "right", no_wrap=True)
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
        loss = "-" if row.valid_loss is None else f"{row.valid_loss:.4f}"
        table.add_row(f"{row.step:,}", when, f"{count(row.bytes)}B", loss, row.kept)
    Console().print(table)


def print_line(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Text in the first column, figures in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
