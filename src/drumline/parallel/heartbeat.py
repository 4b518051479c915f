"""Signs of life: what each rank is doing, written where the process that started it reads it, and what is a hang.

A rank keeps one small record: its phase and step, when it last came further, and a tick that a thread renews. An old
tick means that the process itself stands still; a fresh tick without progress means that its code does. All times are
time.monotonic(), which the processes of one host share. A process that nobody supervises writes nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import statistics
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drumline.signals import show_stacks

ATTEMPT = "DRUMLINE_ATTEMPT"
"""The variable that holds the folder of the present attempt to run all ranks."""

PHASES = ("starting", "compiling", "evaluate", "save", "data", "compute", "exchange", "ending")
"""In the order in which a rank comes to them, where `step` is the number of steps that are done."""
_JUDGED = frozenset(("evaluate", "save", "data", "compute", "exchange"))
"""Where no progress is a hang. The other phases may take as long as they like."""

_PROGRESS, _TICK = struct.Struct("=dqq16s"), struct.Struct("=d")
_TICK_AT, _SIZE = _PROGRESS.size, _PROGRESS.size + _TICK.size
_TICK_EVERY_S, _FROZEN_S = 0.1, 1.5
_LEAST_LIMIT_S, _MEDIANS, _PATIENT = 60.0, 20, 10
_OTHERS_S, _STACKS_S = 3.0, 3.0
_PR_SET_PDEATHSIG = 1


class Pulse:
    """A rank's own side: `at` says where it is."""

    def __init__(self, record: mmap.mmap | None) -> None:
        self._record = record
        self._ended = threading.Event()

    @classmethod
    def start(cls) -> Pulse:
        """Begin to tick, and be ready to show this process's stacks on SIGUSR2; nothing where nobody supervises."""
        folder, rank = os.environ.get(ATTEMPT), os.environ.get("RANK")
        if folder is None or rank is None or not Path(folder).is_dir():
            return cls(None)
        stacks = (Path(folder) / f"stack-{rank}").open("w", encoding="utf-8")
        show_stacks(stacks)
        descriptor = os.open(Path(folder) / f"pulse-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fresh = os.fstat(descriptor).st_size < _SIZE
            os.truncate(descriptor, _SIZE)
            pulse = cls(mmap.mmap(descriptor, _SIZE))
        finally:
            os.close(descriptor)
        pulse._tick()
        if fresh:
            pulse.at("starting", 0)
        threading.Thread(target=pulse._keep_ticking, name="pulse", daemon=True).start()
        return pulse

    def at(self, phase: str, step: int) -> None:
        """Come to a phase with `step` steps done; each call is progress."""
        if self._record is not None:
            _PROGRESS.pack_into(self._record, 0, time.monotonic(), os.getpid(), step, phase.encode())

    def still_there(self) -> None:
        """Progress within a phase that is allowed to take its time."""
        if self._record is not None:
            _TICK.pack_into(self._record, 0, time.monotonic())

    def stop(self) -> None:
        """No longer judged: what is left to do may take as long as it likes."""
        if self._record is not None:
            self.at("ending", _PROGRESS.unpack_from(self._record)[2])
        self._ended.set()

    def _tick(self) -> None:
        if self._record is not None:
            _TICK.pack_into(self._record, _TICK_AT, time.monotonic())

    def _keep_ticking(self) -> None:
        while not self._ended.wait(_TICK_EVERY_S):
            self._tick()


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    phase: str
    step: int
    progressed_s: float
    ticked_s: float
    pid: int = 0


@dataclass(frozen=True)
class Hang:
    """A rank that holds up the others."""

    rank: int
    phase: str
    step: int
    idle_s: float
    frozen: bool
    """Whether the process itself stands still, and not only its code."""


def read_pulse(folder: Path, rank: int) -> Beat | None:
    """None for a rank that has not said anything yet."""
    try:
        record = (folder / f"pulse-{rank}").read_bytes()
    except OSError:
        return None
    if len(record) < _SIZE:
        return None
    progressed_s, pid, step, phase = _PROGRESS.unpack_from(record)
    (ticked_s,) = _TICK.unpack_from(record, _TICK_AT)
    return Beat(phase.rstrip(b"\0").decode(errors="replace"), step, progressed_s, ticked_s, pid)


class Watch:
    """Judges the ranks of one attempt: knows how long a step takes here, and so when one takes too long."""

    def __init__(self, limit_s: float | None) -> None:
        self._given_s = limit_s
        self._step: int | None = None
        self._since_s = self._looked_s = self._awake_s = time.monotonic()
        self._steps_s: deque[float] = deque(maxlen=101)

    def limit_s(self, beats: Mapping[int, Beat]) -> float:
        """How long a rank may make no progress."""
        # What steps take says nothing about how long a checkpoint takes to write, while all others wait for it.
        patient = any(beat.phase in ("save", "evaluate") for beat in beats.values())
        return self._step_limit_s() * (_PATIENT if patient else 1)

    def _step_limit_s(self) -> float:
        """As asked for, else many times what a step takes."""
        if self._given_s is not None:
            return self._given_s
        return max(_LEAST_LIMIT_S, _MEDIANS * statistics.median(self._steps_s) if self._steps_s else 0.0)

    def look(self, beats: Mapping[int, Beat], now_s: float) -> Hang | None:
        """The rank that holds up the others, if one does."""
        if now_s - self._looked_s > _FROZEN_S:
            self._awake_s = now_s  # it was this process, or all of the machine, that stood still
        self._looked_s = now_s
        self._learn(beats, now_s)
        limit_s, frozen_s = self.limit_s(beats), self._step_limit_s()  # whatever a rank does, it ticks
        for rank, beat in beats.items():
            still_s = now_s - max(beat.ticked_s, self._awake_s)
            if still_s > max(_FROZEN_S, frozen_s if beat.phase in _JUDGED else max(frozen_s, _LEAST_LIMIT_S)):
                return Hang(rank, beat.phase, beat.step, still_s, frozen=True)
        if not beats:
            return None
        # Who has come least far is the one all others wait for: only its progress counts, and of several the latest.
        rank, beat = min(beats.items(), key=lambda item: (item[1].step, _order(item[1].phase), -item[1].progressed_s))
        idle_s = now_s - max(beat.progressed_s, self._awake_s)
        frozen = now_s - max(beat.ticked_s, self._awake_s) > _FROZEN_S
        if beat.phase == "exchange":
            limit_s += _OTHERS_S  # all ranks here wait: if for one of another host, that host will name it
        if beat.phase in _JUDGED and idle_s > limit_s and not frozen:
            return Hang(rank, beat.phase, beat.step, idle_s, frozen=False)
        return None

    def excuse(self, now_s: float) -> None:
        """What was found is none of these ranks' doing: give all of them as long again."""
        self._awake_s = now_s

    def _learn(self, beats: Mapping[int, Beat], now_s: float) -> None:
        step = min((beat.step for beat in beats.values() if beat.phase in _JUDGED), default=None)
        if step is None or step == self._step:
            return
        if self._step is not None and step > self._step:
            self._steps_s.append((now_s - self._since_s) / (step - self._step))
        self._step, self._since_s = step, now_s


_OUTERMOST = ("in <module>\n", "in _run_module_as_main\n")
"""The main thread's stack comes last, and at its end what called it: a script, or `python -m`."""


class Stacks:
    """What ranks show of their stacks on a SIGUSR2 that is sent once this is made."""

    def __init__(self, folder: Path, ranks: Iterable[int]) -> None:
        self._files = {rank: folder / f"stack-{rank}" for rank in ranks}
        self._before = {rank: len(_text(file)) for rank, file in self._files.items()}

    def read(self) -> dict[int, str]:
        return {rank: _text(file)[self._before[rank] :] for rank, file in self._files.items()}

    def wait(self, *, but: int | None = None) -> None:
        """Until all have shown theirs, or for a moment: a process may be in no state to."""
        deadline = time.monotonic() + _STACKS_S
        while not all(text.endswith(_OUTERMOST) for rank, text in self.read().items() if rank != but):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else 0


def promise_an_ending() -> None:
    """Let the supervisor know that these ranks are to train: one that exits before it comes to its end is at fault."""
    if folder := os.environ.get(ATTEMPT):
        (Path(folder) / "to_end").touch()


def has_promised_an_ending(folder: Path) -> bool:
    return (folder / "to_end").exists()


def tell_run_dir(path: Path) -> None:
    """Let the supervisor know which run folder rank 0 chose; nothing where nobody supervises."""
    if folder := os.environ.get(ATTEMPT):
        aside = Path(folder) / f"run_dir.{os.getpid()}"
        aside.write_text(str(path.absolute()), encoding="utf-8")
        aside.replace(Path(folder) / "run_dir")


def read_run_dir(folder: Path) -> Path | None:
    """What rank 0 told with `tell_run_dir`."""
    try:
        return Path((folder / "run_dir").read_text(encoding="utf-8"))
    except OSError:
        return None


def is_supervised() -> bool:
    """Whether a launcher of ours watches this rank, and ends it when need be."""
    return ATTEMPT in os.environ


def started_again() -> bool:
    """Whether this launcher has started its ranks before."""
    if folder := os.environ.get(ATTEMPT):
        return Path(folder).name != attempt_name(1)
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def attempt_name(number: int) -> str:
    return f"attempt-{number}"


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it ends, however that ends (Linux alone can)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def under_torchrun(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Make up for what torchrun leaves open where it can be done from here; what is left, as lines to say."""
    if ATTEMPT in environ or "TORCHELASTIC_RUN_ID" not in environ:
        return []
    die_with_parent()
    lines = []
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        lines.append(
            f"torchrun --max_restarts={restarts} may wait for ever after a restart, because ranks meet at the store of "
            "the attempt before: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 first, or use `drumline train --nproc`"
        )
    if "SLURM_JOB_ID" in environ and "SIGUSR1" not in environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ""):
        lines.append(
            "SIGUSR1, which sbatch --signal may send, would kill torchrun: start it with "
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
        )
    return lines
