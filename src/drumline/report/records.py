"""Records: one per logged step, to the console, metrics.jsonl, train.log and optional trackers.

metrics.jsonl is what plots are made from; everything else shows the same records in another form. A sink has
write(record) and close(); if it fails, it is disabled with a warning and the run continues. The same goes for a disk
that is full, read-only or unreachable, and for a closed console: this is reported once, where possible, and retried.
All of it is written by threads (writer.py), so that no step waits for a disk, a pipe or a terminal.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drumline.files import LineFile
from drumline.report.writer import Writer
from drumline.units import count, duration

if TYPE_CHECKING:
    from drumline.report.bars import TrainingBar

Record = dict[str, Any]
Formats = dict[str, Callable[[Any], str]]
_CONSOLE = "the console"
_SOON_S, _PATIENCE_S = 1.0, 30.0
"""How long the end of a run waits for a disk that hangs: without a word, and at most."""
_SPARED_S = 1.0
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
    """Passes each record to every sink, and messages to those that show them; nothing is waited for before the end."""

    formats = FORMATS

    def __init__(self, sinks: Sequence[Sink], *, log: Path | None, silent: bool = False) -> None:
        self.sinks = list(sinks)
        self._log = LineFile(log) if log else None
        self._silent, self._total_steps = silent, 0
        self._bar: TrainingBar | None = None
        self._writers: dict[str, Writer] = {}
        self._console = Writer(_CONSOLE, self.say)
        self._order = threading.RLock()  # console and log have the same lines in the same order

    def write(self, record: Record) -> None:
        self.say(format_record(record, total_steps=self._total_steps, formats=self.formats))
        record = timed(record)
        self.show(record)
        for sink in list(self.sinks):
            self.later(_name(sink), partial(self._give, sink, partial(sink.write, record)))

    def line(self, path: Path, record: Record) -> None:
        """Append a record to another file of lines."""
        self.later(str(path), partial(JsonlSink(path).write, timed(record)))

    def at(self, step: int) -> None:
        """After each step, logged or not: moves the progress bar."""
        if self._bar is not None:
            self._bar.at(step)

    def show(self, facts: Mapping[str, Any]) -> None:
        """A record or an event, below the progress bar."""
        if self._bar is not None:
            self._bar.show(facts)

    def say(self, message: str) -> None:
        """Print a message: console and train.log."""
        with self._order:
            if not self._silent:
                self._console.put(partial(self._show, self._bar, message))
            if self._log is not None:
                self.later(str(self._log.path), partial(self._log.append, message))

    def attempt(self, what: str, write: Callable[[], object]) -> None:
        """Write something that a run can do without: an error is reported once, and the run continues."""
        self._writer(what).now(write)

    def later(self, what: str, write: Callable[[], object]) -> None:
        """The same without waiting for the disk, and retried; in order for each `what`."""
        self._writer(what).put(write)

    def flush(self, *, patient: bool = False) -> bool:
        """Whether all is written; waits for that, and some time for a disk that hangs."""
        patience_s = _PATIENCE_S if patient else 0.0
        for what, writer in list(self._writers.items()):
            if writer.settle(_SOON_S) and patience_s:
                self.say(f"waiting for {what}, {patience_s:.0f} s at most")
                patience_s *= not writer.settle(patience_s)
        return not sum(writer.settle(0) for writer in list(self._writers.values()))

    @contextmanager
    def showing_progress(self, total_steps: int) -> Iterator[None]:
        """Records inside are of a run of this length; on a terminal, a progress bar is shown."""
        self._total_steps = total_steps
        if sys.stdout.isatty() and not self._silent:
            from drumline.report.bars import TrainingBar

            self._console.settle(_SOON_S)  # what was said before stands above the bar
            self._bar = TrainingBar(total_steps)
        try:
            yield
        finally:
            if self._bar is not None:
                self._console.put(self._bar.stop)
                self._bar = None

    def close(self) -> None:
        is_written = self.flush(patient=True)
        for sink in [each for each in self.sinks if not isinstance(each, JsonlSink)]:
            self.later(_name(sink), partial(self._give, sink, sink.close))
        self.flush(patient=is_written)
        unwritten = {_CONSOLE: self._console.settle(_PATIENCE_S)}
        unwritten |= {what: writer.settle(0) for what, writer in self._writers.items()}
        for what, lines in unwritten.items():
            if lines:
                self.say(f"warning: {what} lacks {lines:,} lines that could not be written")
        self.flush()
        self._log = None
        if self._console.settle(_SOON_S) or self._console.fails:
            from drumline.files import forget_stdout

            forget_stdout()

    def _writer(self, what: str) -> Writer:
        return self._writers.setdefault(what, Writer(what, self.say))

    def _give(self, sink: Sink, give: Callable[[], None]) -> None:
        """metrics.jsonl is retried if it fails, other sinks are disabled."""
        try:
            if sink in self.sinks:
                give()
        except (Exception, SystemExit) as error:
            if isinstance(sink, JsonlSink):
                raise
            self.sinks.remove(sink)
            self.say(f"warning: {_name(sink)} failed and is disabled ({type(error).__name__}: {error})")

    def _show(self, bar: TrainingBar | None, text: str) -> None:
        try:
            if bar is not None:
                bar.print(text)
            else:
                print(f"{text}\n", end="", file=sys.stdout, flush=True)
        except (OSError, ValueError) as error:  # ValueError: closed, or an encoding without this character
            if bar is not None:
                bar.stop()
            if not self._console.fails:
                to_stderr(f"warning: cannot write to the console ({error})")
            raise RuntimeError(str(error)) from error  # no OSError: what a console has refused is not tried again


def timed(record: Record) -> Record:
    return {**record, "time": round(time.time(), 3)}


def _name(sink: Sink) -> str:
    return str(getattr(sink, "path", type(sink).__name__))


def flush_console() -> None:
    """Flush printed output; ignores a closed console."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def to_stderr(text: str) -> None:
    with suppress(OSError, ValueError):  # there is nowhere left to report it
        print(text, file=sys.stderr, flush=True)


class JsonlSink:
    """metrics.jsonl: one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, LineFile(path)

    def write(self, record: Record) -> None:
        # NaN is not valid JSON: strict parsers would reject the line.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.append(json.dumps(clean))

    def close(self) -> None:
        """Nothing is open between two lines."""


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


class Sparing:
    """Calls something only as often as it costs little: not in the first second, then for 2 % of the time at most.

    pause_s: the shortest time between two calls, if that is longer than a second
    """

    def __init__(self, work: Callable[..., None], *, pause_s: float = 0.0) -> None:
        self._work, self._pause_s, self._after_s = work, max(_SPARED_S, pause_s), time.monotonic() + _SPARED_S

    def __call__(self, *args: Any) -> None:
        began_s = time.monotonic()
        if began_s >= self._after_s:
            self._work(*args)
            ended_s = time.monotonic()
            self._after_s = ended_s + max(self._pause_s, 50 * (ended_s - began_s))


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
