"""Tables of runs and checkpoints for the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from drumline.units import count

if TYPE_CHECKING:  # imports torch, which the other tables do not need
    from drumline.checkpoint import Listed


def print_runs(rows: Sequence[dict[str, Any]], where: Path) -> None:
    """One row per run."""
    console = Console()
    if not rows:
        console.print(f"no runs in {where}; start one with `drumline train`", highlight=False)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("run", "state", "step", "loss", "validation", "bits/byte", "updated"):
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
    """One row per checkpoint."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("step", "saved", "size", "validation", "kept because"):
        table.add_column(column, justify="left" if column in ("saved", "kept because") else "right", no_wrap=True)
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
        loss = "-" if row.valid_loss is None else f"{row.valid_loss:.4f}"
        table.add_row(f"{row.step:,}", when, f"{count(row.bytes)}B", loss, row.kept)
    Console().print(table)


def print_line(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Text in the first column, numbers in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
