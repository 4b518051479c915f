"""One run: its files read as they grow, and what a page shows of them as JSON."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from drumline.files import RunFolder
from drumline.watch import cards
from drumline.watch.columns import Columns, Floats, parse_lines
from drumline.watch.events import EventLog, number_of
from drumline.watch.goodput import time_spent
from drumline.watch.lines import LineReader
from drumline.watch.ranks import RankRecords
from drumline.watch.thinning import curve

AXES = ("step", "tokens", "time")
_NO_CURVES = {"step", "time", "tokens", "epoch", "eta_s", "eval_s"}
_MOST_SAMPLES, _LONGEST_SAMPLE = 200, 4000
_MOST_EVALUATIONS = 500
_TAIL_RECORDS = 2000
"""More new records than these are not sent one by one: the page asks for its curves again."""


class RunSource:
    """A run that is watched. All methods may be called from any thread."""

    def __init__(self, path: Path, name: str) -> None:
        self.folder, self.name = RunFolder(path), name
        self.train, self.evals = Columns(), Columns()
        self.ranks, self.events = RankRecords(), EventLog()
        self.samples: list[dict[str, Any]] = []
        self.generation = 0
        """Changes when records were taken back: what was sent before is void."""
        self.left_bytes = 0
        """What metrics.jsonl has beyond what was read."""
        self.lock = threading.RLock()
        self._metrics, self._ranks, self._events, self._samples = (
            LineReader(path, file)
            for file in (self.folder.metrics, self.folder.ranks, self.folder.events, self.folder.samples)
        )
        self._status: dict[str, Any] = {}
        self._cards: dict[str, Any] = {}
        self._cards_of: Any = None

    def refresh(self, *, budget_s: float = math.inf) -> None:
        """Read what is new, for about as long as this."""
        until = time.monotonic() + budget_s
        with self.lock:
            self._read(self._events, self.events.clear, self.events.add, until)
            self._read(self._samples, self.samples.clear, self._add_samples, until)
            self._read(self._ranks, self.ranks.clear, self.ranks.add, until)
            self._read_metrics(until)
            self.read_status()

    def read_status(self) -> None:
        """status.json, as it is now."""
        self._status = cards.read_json(self.folder.path, self.folder.status)

    def _read(self, reader: LineReader, clear: Callable[[], None], add: Callable[[Any], None], until: float) -> None:
        while True:
            read = reader.read()
            if read.again:
                clear()
                self.generation += 1
            add(parse_lines(read.lines))
            if not read.left_bytes or time.monotonic() > until:
                return

    def _read_metrics(self, until: float) -> None:
        while True:
            read = self._metrics.read()
            if read.again:
                rows = read.back_to or (0, 0)
                self.train.cut(rows[0])
                self.evals.cut(rows[1])
                self.generation += 1
            records = [each for each in parse_lines(read.lines) if isinstance(each.get("step"), int | float)]
            self.train.add([each for each in records if "loss" in each])
            self.evals.add([each for each in records if "loss" not in each])
            self._metrics.mark((self.train.rows, self.evals.rows))
            self.left_bytes = read.left_bytes
            if not read.left_bytes or time.monotonic() > until:
                return

    def _add_samples(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            shown = {name: str(record.get(name, ""))[:_LONGEST_SAMPLE] for name in ("prompt", "text")}
            self.samples.append({"step": number_of(record.get("step")), "time": record.get("time"), **shown})
        del self.samples[:-_MOST_SAMPLES]

    def version(self) -> dict[str, Any]:
        """What is compared to see whether a page has the newest."""
        with self.lock:
            return {
                "curves": [self.generation, self.train.rows, self.evals.rows],
                "ranks": [self.generation, self.ranks.count],
                "run": [self.generation, self.events.count, len(self.samples), self.evals.rows, self._status],
            }

    def state(self) -> str:
        """finished, stopped, failed or running; lost if its process is gone from this host."""
        state = str(self._status.get("state", "new"))
        if state in ("running", "restarting") and self._status.get("host") == socket.gethostname():
            pid = self._status.get("pid")
            return state if isinstance(pid, int) and 0 < pid < 1 << 31 and psutil.pid_exists(pid) else "lost"
        return state

    def _axis(self, table: Columns, axis: str, start: int = 0) -> Floats:
        """x of each record. time: seconds since the first record of the run."""
        steps = table.column("step", start)
        if axis == "tokens":
            tokens = table.column("tokens", start)
            each = None if np.isfinite(tokens).all() else cards.tokens_per_step(self.cards()["config"])
            return np.where(np.isfinite(tokens), tokens, steps * each) if each else tokens
        if axis == "time":
            firsts = [part[np.isfinite(part)][:1] for part in (self.train.column("time"), self.evals.column("time"))]
            begin = min(np.concatenate(firsts), default=0.0)
            return table.column("time", start) - begin
        return steps

    def curves(
        self, *, axis: str = "step", buckets: int = 600, low: float = -math.inf, high: float = math.inf
    ) -> dict[str, Any]:
        """All curves of the run between two places of an axis, thinned."""
        with self.lock:
            found = {}
            for table in (self.train, self.evals):
                x = self._axis(table, axis)
                for name in table.names():
                    if name not in _NO_CURVES:
                        points = curve(x, table.column(name), buckets=buckets, low=low, high=high)
                        if points["x"]:
                            found[name] = points
            has_axes = [each for each in AXES if np.isfinite(self._axis(self.train, each)).any()]
            return {
                "run": self.name,
                "axis": axis,
                "axes": has_axes or ["step"],
                "at": self.version()["curves"],
                "left_bytes": self.left_bytes,
                "curves": found,
            }

    def tail(self, at: list[int], *, axis: str) -> dict[str, Any] | None:
        """Points after those that a page has; None: they are too many, or what it has is void."""
        with self.lock:
            generation, *rows = at
            new = self.train.rows - rows[0] + self.evals.rows - rows[1]
            if generation != self.generation or not 0 <= new <= _TAIL_RECORDS:
                return None
            found: dict[str, Any] = {}
            for table, start in zip((self.train, self.evals), rows, strict=True):
                x = self._axis(table, axis, start)
                for name in table.names() if start < table.rows else []:
                    y = table.column(name, start)
                    inside = np.isfinite(x) & np.isfinite(y)
                    if name not in _NO_CURVES and inside.any():
                        found[name] = {"x": x[inside].tolist(), "y": y[inside].tolist()}
            return {
                "run": self.name,
                "axis": axis,
                "from": at,
                "at": self.version()["curves"],
                "curves": found,
                "latest": self.latest(),
            }

    def latest(self) -> dict[str, Any]:
        """The last value of each name, and the smallest held-out loss."""
        with self.lock:
            last = {name: self.train.last(name) for name in self.train.names()}
            last |= {name: self.evals.last(name) for name in self.evals.names() if name not in last}
            held_out = self.evals.column("valid_loss")
            best = float(np.nanmin(held_out)) if np.isfinite(held_out).any() else None
            return {**last, "best_valid_loss": best, "evaluations": int(np.isfinite(held_out).sum())}

    def _evaluations(self) -> list[dict[str, Any]]:
        """The newest evaluations, for the time line."""
        start = max(0, self.evals.rows - _MOST_EVALUATIONS)
        columns = [self.evals.column(name, start).tolist() for name in ("step", "time", "valid_loss", "eval_s")]
        names = ("step", "at", "valid_loss", "eval_s")
        rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        return [
            {"event": "evaluation"} | {name: value for name, value in row.items() if math.isfinite(value)}
            for row in rows
        ]

    def goodput(self) -> dict[str, Any] | None:
        """Where the time went."""
        stalls = sum(self.events.totals[name].stall_s for name in ("saved", "snapshot") if name in self.events.totals)
        state = self.state()
        return time_spent(
            self.events.events(),
            steps=self.train.column("step"),
            times=self.train.column("time"),
            eval_s=float(np.nansum(self.evals.column("eval_s"))),
            stall_s=stalls,
            now=time.time() if state in ("running", "restarting") else None,
        )

    def started(self) -> dict[str, Any]:
        """The event of the newest start, which says where the run runs."""
        starts = self.events.events("started", "resumed")
        return next((event for event in reversed(starts) if event.get("hosts")), starts[-1] if starts else {})

    def cards(self) -> dict[str, Any]:
        """Config, data and model; read again when a file has changed."""
        newest = cards.checkpoints(self.folder)[-1:]
        of = [newest, *(_changed(path) for path in (self.folder.config, self.folder.data, self.folder.evals))]
        if of != self._cards_of:
            self._cards = {
                "config": cards.config_of(self.folder),
                "data": cards.data_card(self.folder),
                "model": cards.model_card(self.folder),
                "versions": cards.versions_of(self.folder),
                "tasks": cards.task_results(self.folder),
            }
            self._cards_of = of
        return self._cards

    def summary(self) -> dict[str, Any]:
        """What a list of runs shows."""
        status = self._status
        step = max(number_of(status.get("step")), self.train.last("step") or 0.0)
        return {
            "run": self.name,
            "state": self.state(),
            "step": step,
            "total_steps": number_of(status.get("total_steps")),
            "updated": status.get("updated"),
            "cause": status.get("cause"),
            "weights_sha256": status.get("weights_sha256"),
        }

    def as_json(self) -> dict[str, Any]:
        """Everything but curves and ranks."""
        with self.lock:
            totals = {name: vars(total) for name, total in self.events.totals.items()}
            return {
                **self.summary(),
                "path": str(self.folder.path),
                "latest": self.latest(),
                "events": _with_world_sizes(self.events.events()),
                "evaluations": self._evaluations(),
                "event_totals": totals,
                "started": self.started(),
                "goodput": self.goodput(),
                "samples": self.samples,
                "stragglers": _stragglers(self.events),
                **self.cards(),
            }


def _with_world_sizes(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Restarts and resumes with the world size before them, where it was another one."""
    told, before = [], None
    for event in events:
        now = event.get("world_size")
        told.append({**event, "old_world_size": before} if before and now and now != before else event)
        before = now or before
    return told


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _stragglers(events: EventLog) -> list[dict[str, Any]]:
    """Ranks that are slow now, by the events of the run."""
    slow: dict[Any, dict[str, Any]] = {}
    for event in events.events("straggler", "straggler over", "started", "resumed", "restart"):
        if event["event"] == "straggler":
            slow[str(event.get("rank"))] = event
        elif event["event"] == "straggler over":
            slow.pop(str(event.get("rank")), None)
        else:
            slow.clear()
    return list(slow.values())


def to_json(value: Any) -> bytes:
    """Without NaN, which is no JSON: null instead."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
