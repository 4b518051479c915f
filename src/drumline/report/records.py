"""Records: one per logged step, to the console, metrics.jsonl, train.log and optional trackers.

metrics.jsonl is what plots are made from; everything else shows the same records in another form. A sink has
write(record) and close(); if it fails, it is disabled with a warning and the run continues. The same goes for a disk
that is full, read-only or unreachable, and for a closed console: this is reported once, where possible, and retried.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drumline.files import LineFile, PostponedError
from drumline.units import count, duration

if TYPE_CHECKING:
    from rich.progress import Progress

Record = dict[str, Any]
Formats = dict[str, Callable[[Any], str]]
_CONSOLE = "the console"
FORMATS: Formats = {
    "loss": lambda v: f"loss {v:.4f}",
    "valid_loss": lambda v: f"validation loss {v:.4f}",
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
"""What the console shows of a record, in this order."""


class Sink(Protocol):
    def write(self, record: Record) -> None: ...
    def close(self) -> None: ...


class Records:
    """Passes each record to every sink, and messages to those that show them."""

    formats = FORMATS

    def __init__(self, sinks: Sequence[Sink], *, log: Path | None, silent: bool = False) -> None:
        self.sinks = list(sinks)
        self._log = LineFile(log) if log else None
        self._silent = silent
        self._total_steps = 0
        self._bar: Progress | None = None
        self._failing: dict[object, str] = {}

    def write(self, record: Record) -> None:
        self._line(format_record(record, total_steps=self._total_steps, formats=self.formats))
        for sink in list(self.sinks):
            try:
                sink.write(record)
                self._works(sink)
            except PostponedError as error:
                self._fails(sink, str(error.filename), error)
            except Exception as error:
                self._drop(sink, error)

    def at(self, step: int) -> None:
        """After each step, logged or not: moves the progress bar."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def say(self, message: str) -> None:
        """Print a message: console and train.log."""
        self._line(message)

    def attempt(self, what: str, write: Callable[[], object]) -> None:
        """Write something that a run can do without: a disk error is reported once, and the run continues."""
        try:
            write()
        except OSError as error:
            self._fails(what, what, error)
        else:
            self._works(what)

    @contextmanager
    def showing_progress(self, total_steps: int) -> Iterator[None]:
        """Records inside are of a run of this length; on a terminal, a progress bar is shown."""
        self._total_steps = total_steps
        if sys.stdout.isatty() and not self._silent:
            from drumline.report.bars import training_bar

            self._bar = training_bar(total_steps)
            self._bar.start()
        try:
            yield
        finally:
            self._stop_progress()

    def _stop_progress(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            with suppress(OSError, ValueError):  # the terminal is closed
                bar.stop()

    def close(self) -> None:
        for sink in list(self.sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)
        if self._log is not None:
            log, self._log = self._log, None
            try:
                log.close()
            except OSError as error:
                self._line(f"warning: {error}")
        if _CONSOLE in self._failing:
            from drumline.files import forget_stdout

            forget_stdout()

    def _line(self, text: str) -> None:
        self.attempt(_CONSOLE, lambda: self._show(text))
        if (log := self._log) is not None:
            self.attempt(str(log.path), lambda: log.append(text))

    def _show(self, text: str) -> None:
        try:
            if self._bar is not None:
                self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif not self._silent:
                print(text, flush=True)
        except (OSError, ValueError) as error:  # ValueError: closed, or an encoding without this character
            self._stop_progress()
            raise OSError(str(error)) from error

    def _fails(self, thing: object, what: str, error: OSError) -> None:
        if thing in self._failing:
            return
        self._failing[thing] = what
        text = f"warning: cannot write to {what} ({error.strerror or error}); the run continues and retries"
        if what == _CONSOLE:
            to_stderr(text)
        self._line(text)

    def _works(self, thing: object) -> None:
        if thing in self._failing:
            self._line(f"{self._failing.pop(thing)} is writable again")

    def _drop(self, sink: Sink, error: Exception) -> None:
        self.sinks.remove(sink)
        self._line(f"warning: {type(sink).__name__} failed and is disabled ({type(error).__name__}: {error})")


def flush_console() -> None:
    """Flush printed output; ignores a closed console."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # there is nowhere left to report it
        print(text, file=sys.stderr, flush=True)


class JsonlSink:
    """metrics.jsonl: one JSON object per line. Lines that cannot be written are kept for later (PostponedError)."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, record: Record) -> None:
        # NaN is not valid JSON: strict parsers would reject the line.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.append(json.dumps(clean))

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics.jsonl; damaged lines are ignored."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [record for line in lines if (record := parsed(line)) is not None]


def parsed(line: bytes) -> Record | None:
    """A line of metrics.jsonl; None if it is damaged: a record is a JSON object with a step."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def format_record(record: Record, *, total_steps: int, formats: Formats = FORMATS) -> str:
    """step   1,200/10,000 | loss 3.2814 | lr 5.99e-04 | grad 0.41 | 182.4k tok/s | mfu 41.2% | eta 1h12m"""
    total = f"{total_steps:,}"
    parts = [f"step {record['step']:>{len(total) + 1},}/{total}"]
    return " | ".join([*parts, *(shown(record[key]) for key, shown in formats.items() if record.get(key) is not None)])


class Speed:
    """Steps per second between two records, not counting evaluation and saving."""

    def __init__(self, step: int) -> None:
        self._step, self._since = step, time.perf_counter()

    def rate(self, step: int) -> float:
        return (step - self._step) / max(1e-9, time.perf_counter() - self._since)

    def lap(self, step: int) -> float:
        rate = self.rate(step)
        self._step, self._since = step, time.perf_counter()
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._since += time.perf_counter() - start
