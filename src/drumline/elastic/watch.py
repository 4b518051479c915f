"""The supervisor's view of its ranks: their heartbeats, which of them hangs, and their stacks."""

from __future__ import annotations

import statistics
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drumline.parallel import CHECKSUM, PROGRESS, TICK, TICK_AT, Attempt

PHASES = ("starting", "compiling", "evaluate", "save", "data", "compute", "exchange", "ending")
"""In the order in which a rank goes through them; `step` is the number of completed steps."""
_JUDGED = frozenset(("evaluate", "save", "data", "compute", "exchange"))
"""Phases in which no progress counts as a hang. The other phases have no time limit."""
_FROZEN_S, _LEAST_LIMIT_S, _MEDIANS, _PATIENT = 1.5, 60.0, 20, 10
_OTHERS_S, _STACKS_S = 3.0, 3.0
_TRIES = 20
_OUTERMOST = ("in <module>\n", "in _run_module_as_main\n")
"""The main thread's stack comes last, ending with its caller: a script, or `python -m`."""


@dataclass(frozen=True)
class Beat:
    """A rank's last heartbeat."""

    phase: str
    step: int
    progressed_s: float
    ticked_s: float
    pid: int = 0
    waits_for: str = ""
    """What it is waiting for the other ranks in; empty: it is working."""


@dataclass(frozen=True)
class Hang:
    """A rank that blocks the others."""

    rank: int
    phase: str
    step: int
    idle_s: float
    frozen: bool
    """Whether the process itself does not run, as opposed to code that makes no progress."""


def read_pulse(attempt: Attempt, rank: int) -> Beat | None:
    """None for a rank without a heartbeat yet."""
    for _ in range(_TRIES):  # one that is being written does not match its checksum
        try:
            record = attempt.pulse(rank).read_bytes()
        except OSError:
            return None
        if len(record) < TICK_AT + TICK.size:
            return None
        if CHECKSUM.unpack_from(record, PROGRESS.size)[0] == zlib.crc32(record[: PROGRESS.size]):
            break
    progressed_s, pid, step, phase, waits_for = PROGRESS.unpack_from(record)
    (ticked_s,) = TICK.unpack_from(record, TICK_AT)
    return Beat(_text(phase), step, progressed_s, ticked_s, pid, _text(waits_for)) if pid else None


def read_run_dir(attempt: Attempt) -> Path | None:
    """The run folder that rank 0 chose; None if it has not chosen yet."""
    try:
        return Path(attempt.run_dir.read_text(encoding="utf-8"))
    except OSError:
        return None


class Watch:
    """Judges the ranks of one attempt: knows how long a step takes, and so when one takes too long."""

    def __init__(self, limit_s: float | None) -> None:
        self._given_s = limit_s
        self._step: int | None = None
        self._since_s = self._looked_s = self._awake_s = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=101)

    def limit_s(self, beats: Mapping[int, Beat]) -> float:
        """How long a rank may go without progress."""
        # The duration of a step says nothing about how long a checkpoint takes to write while the others wait.
        patient = any(beat.phase in ("save", "evaluate") for beat in beats.values())
        return self._step_limit_s() * (_PATIENT if patient else 1)

    def _step_limit_s(self) -> float:
        """The user's setting, else many times the duration of a step."""
        if self._given_s is not None:
            return self._given_s
        return max(_LEAST_LIMIT_S, _MEDIANS * statistics.median(self._steps_s) if self._steps_s else 0.0)

    def look(self, beats: Mapping[int, Beat], now_s: float) -> Hang | None:
        """The rank that blocks the others, if any."""
        if now_s - self._looked_s > _FROZEN_S:
            self._awake_s = now_s  # this process, or the whole machine, was suspended
        self._looked_s = now_s
        self._learn(beats, now_s)
        limit_s, frozen_s = self.limit_s(beats), self._step_limit_s()  # a rank ticks in every phase
        for rank, beat in beats.items():
            still_s = now_s - max(beat.ticked_s, self._awake_s)
            if still_s > max(_FROZEN_S, frozen_s if beat.phase in _JUDGED else max(frozen_s, _LEAST_LIMIT_S)):
                return Hang(rank, beat.phase, beat.step, still_s, frozen=True)
        if not beats:
            return None
        # The others wait for the rank furthest behind: only its progress counts, and the latest of several.
        rank, beat = min(beats.items(), key=lambda item: (item[1].step, _order(item[1].phase), -item[1].progressed_s))
        idle_s = now_s - max(beat.progressed_s, self._awake_s)
        frozen = now_s - max(beat.ticked_s, self._awake_s) > _FROZEN_S
        if beat.phase == "exchange":
            limit_s += _OTHERS_S  # all ranks here wait: if for a rank of another host, that host will report it
        if beat.phase in _JUDGED and idle_s > limit_s and not frozen:
            return Hang(rank, beat.phase, beat.step, idle_s, frozen=False)
        return None

    def excuse(self, now_s: float) -> None:
        """None of these ranks is the culprit: give all of them the same time again."""
        self._awake_s = now_s

    def _learn(self, beats: Mapping[int, Beat], now_s: float) -> None:
        step = min((beat.step for beat in beats.values() if beat.phase in _JUDGED), default=None)
        if step is None or step == self._step:
            return
        if self._step is not None and step > self._step:
            self._steps_s.append((now_s - self._since_s) / (step - self._step))
        self._step, self._since_s = step, now_s


class Stacks:
    """The stacks that ranks dump on a SIGUSR2 sent when this is created."""

    def __init__(self, attempt: Attempt, ranks: Iterable[int]) -> None:
        self._files = {rank: attempt.stacks(rank) for rank in ranks}
        self._before = {rank: len(_shown(file)) for rank, file in self._files.items()}

    def read(self) -> dict[int, str]:
        return {rank: _shown(file)[self._before[rank] :] for rank, file in self._files.items()}

    def wait(self, *, but: int | None = None) -> None:
        """Wait until all have dumped theirs, but only for a moment: a process may be unable to."""
        deadline = time.monotonic() + _STACKS_S
        while not all(text.endswith(_OUTERMOST) for rank, text in self.read().items() if rank != but):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _shown(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else 0


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")
