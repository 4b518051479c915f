"""Tables of runs and checkpoints for the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from drumline.report.commands import command
from drumline.units import count

if TYPE_CHECKING:  # imports torch, which the other tables do not need
    from drumline.checkpoint import Listed

_FOLLOW_S = 1.0
_RUNNING = ("running", "restarting")


def print_runs(rows: Sequence[dict[str, Any]], where: Path) -> None:
    """One row per run. In a narrow terminal a long name takes several lines, but no number is cut."""
    _console().print(_runs(rows, where))


def follow_runs(rows: Callable[[], Sequence[dict[str, Any]]], where: Path) -> None:
    """The same, kept up to date until no run is running any more; elsewhere than on a terminal, once per change."""
    console, before = _console(), ""
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            now = rows()
            shown = _runs(now, where)
            if live is not None:
                live.update(shown, refresh=True)
            elif (text := str([(row["run"], row["state"], row["step"]) for row in now])) != before:
                before = text
                console.print(shown)
            if not any(row["state"] in _RUNNING for row in now):
                return
            time.sleep(_FOLLOW_S)


def _runs(rows: Sequence[dict[str, Any]], where: Path) -> RenderableType:
    if not rows:
        return Text(f"no runs in {where}; start one with `{command('train')}`")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    stalls = any(row["stalled"] is not None for row in rows)  # not of runs that are too short to tell
    for column in ("state", "step", "loss", "valid", "bits/byte", *(["stalled"] if stalls else []), "updated"):
        table.add_column(column, justify="left" if column in ("state", "updated") else "right", no_wrap=True)
    for row in rows:
        losses = (row[key] for key in ("loss", "valid_loss", "bits_per_byte"))
        numbers = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
        if stalls:
            numbers.append("-" if row["stalled"] is None else f"{row['stalled']:.1%}")
        steps = f"{row['step']:,}/" + (f"{row['total_steps']:,}" if row["total_steps"] else "?")
        table.add_row(row["run"], row["state"], steps, *numbers, _ago(str(row["updated"])))
    return Group(table, *(Text(f"{row['run']}: {row['cause']}") for row in rows if row["cause"]))


def _console() -> Console:
    """As wide as the terminal; what is no terminal gets whole lines."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)


def _ago(when: str) -> str:
    """2026-11-16T07:28:29+0000 -> 3d ago"""
    try:
        seconds = max(0.0, time.time() - datetime.strptime(when, "%Y-%m-%dT%H:%M:%S%z").timestamp())
    except ValueError:
        return "-"
    size, letter = next((each for each in ((86400, "d"), (3600, "h"), (60, "m")) if seconds >= each[0]), (1, "s"))
    return f"{seconds // size:.0f}{letter} ago"


def print_checkpoints(rows: Sequence[Listed]) -> None:
    """One row per checkpoint."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("step", "saved", "size", "valid", "kept because"):
        table.add_column(column, justify="left" if column in ("saved", "kept because") else "right", no_wrap=True)
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
        loss = "-" if row.valid_loss is None else f"{row.valid_loss:.4f}"
        table.add_row(f"{row.step:,}", when, f"{count(row.bytes)}B", loss, row.kept)
    _console().print(table)


def print_line(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Text in the first column, numbers in the others."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    _console().print(table)
