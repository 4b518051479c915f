"""Records: one per logged step, to the console, metrics.jsonl, train.log and whoever else was asked for.

metrics.jsonl is the truth that every plot reads; all else shows the same record in another form. A sink has
write(record) and close(); one that fails is dropped with a warning and never stops a run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drumline.errors import DrumlineError

Record = dict[str, Any]


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Records:
    """Hands each record to every sink, and messages for people to those that show them."""

    def __init__(self, sinks: Sequence[Sink], *, log: Path | None, silent: bool = False) -> None:
        self._sinks = list(sinks)
        self._log = log.open("a", encoding="utf-8") if log else None
        self._silent = silent
        self._total_steps = 0
        self._bar: Progress | None = None

    def write(self, record: Record) -> None:
        self._line(format_record(record, total_steps=self._total_steps))
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record["step"])
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:
                self._drop(sink, error)

    def say(self, message: str) -> None:
        """A message for people: console and train.log."""
        self._line(message)

    def start_progress(self, total_steps: int) -> None:
        """From here on records are of a run this long; on a terminal a bar shows how far it is."""
        self._total_steps = total_steps
        if sys.stdout.isatty() and not self._silent:
            self._bar = _bar(total_steps)
            self._bar.start()

    def stop_progress(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def close(self) -> None:
        self.stop_progress()
        for sink in list(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)
        if self._log is not None:
            self._log.close()
            self._log = None

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._silent:
            print(text, flush=True)
        if self._log is not None:
            self._log.write(text + "\n")
            self._log.flush()

    def _drop(self, sink: Sink, error: Exception) -> None:
        self._sinks.remove(sink)
        self._line(f"warning: {type(sink).__name__} failed and gets no more records ({type(error).__name__}: {error})")


def tell(error: DrumlineError) -> None:
    """What is wrong and what to do, on stderr; unless another rank tells it."""
    if not error.told:
        lines = [f"error: {' '.join(error.problem.split())}", *(f"  {line}" for line in error.details)]
        print("\n".join([*lines, f"  fix: {' '.join(error.fix.split())}"]), file=sys.stderr, flush=True)


class JsonlSink:
    """metrics.jsonl: one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        # NaN is not JSON: strict readers would refuse the whole line.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics.jsonl; a last line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def forget_after(path: Path, step: int) -> None:
    """Drop the records of steps that a resumed run will do again, so that none appears twice."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")


def format_record(record: Record, *, total_steps: int) -> str:
    """step   1,200/10,000 | loss 3.2814 | lr 5.99e-04 | grad 0.41 | 182.4k tok/s | mfu 41.2% | eta 1h12m"""
    total = f"{total_steps:,}"
    parts = [f"step {record['step']:>{len(total) + 1},}/{total}"]
    for key, shown in _FORMATS.items():
        if record.get(key) is not None:
            parts.append(shown(record[key]))
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """1h12m, 3m05s, 41s"""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def count(number: float) -> str:
    """182.4k, 3.1M"""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


_FORMATS: dict[str, Callable[[Any], str]] = {
    "loss": lambda v: f"loss {v:.4f}",
    "valid_loss": lambda v: f"held-out loss {v:.4f}",
    "perplexity": lambda v: f"perplexity {v:,.2f}",
    "bits_per_byte": lambda v: f"{v:.4f} bits/byte",
    "lr": lambda v: f"lr {v:.2e}",
    "grad_norm": lambda v: f"grad {v:.2f}",
    "tokens_per_s": lambda v: f"{count(v)} tok/s",
    "samples_per_s": lambda v: f"{count(v)} samples/s",
    "mfu": lambda v: f"mfu {v:.1%}",
    "eta_s": lambda v: f"eta {duration(v)}",
    "skipped_steps": lambda v: f"skipped {v}",
}


def _bar(total_steps: int) -> Progress:
    bar = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        transient=True,
    )
    bar.add_task("training", total=total_steps)
    return bar
