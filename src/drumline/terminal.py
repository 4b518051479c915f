"""What the terminal shows beside records: how far preparing is, what it made, and the table of runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from drumline.prepare import Prepared, ProgressCallback
from drumline.prepare import Progress as PrepareProgress

_STAGES = {"reading": "reading text", "learning": "learning a vocabulary", "encoding": "encoding"}
_PLAIN_EVERY_S = 5.0


@contextmanager
def preparing() -> Iterator[ProgressCallback]:
    """A callback that draws a bar on a terminal, and elsewhere writes a line now and then."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        transient=True,
    )
    plain = not sys.stdout.isatty()
    stage, since, last_line = "", time.perf_counter(), 0.0

    def show(progress: PrepareProgress) -> None:
        nonlocal stage, since, last_line
        now = time.perf_counter()
        if progress.stage != stage:
            stage, since = progress.stage, now
            for task in bar.task_ids:
                bar.remove_task(task)
            bar.add_task(_STAGES[stage], total=progress.bytes_total, speed="")
        speed = f"{progress.text_bytes / 1e6:.0f} MB, {progress.text_bytes / 1e6 / max(0.05, now - since):.1f} MB/s"
        if plain and now - last_line > _PLAIN_EVERY_S:
            sys.stdout.write(f"{_STAGES[stage]}: {speed}\n")
            sys.stdout.flush()
            last_line = now
        elif not plain:
            bar.start()
            done = min(progress.bytes_done, progress.bytes_total or progress.bytes_done)
            bar.update(bar.task_ids[0], completed=done, speed="" if stage == "learning" else speed)

    try:
        yield show
    finally:
        bar.stop()


def prepared_lines(made: Prepared) -> list[str]:
    """What `prepare` made, for people."""
    how = (
        "there already"
        if made.reused
        else f"{made.text_bytes / 1e6:.1f} MB of text in {made.seconds:.1f} s ({made.mb_per_s:.1f} MB/s)"
    )
    lines = [f"{made.path}: {how}, vocabulary {made.vocab_size:,}"]
    for name, split in made.splits.items():
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
