"""A rank's signs of life: what it is doing and what it waits for, written where its supervisor reads it.

One small record: phase, step, what it waits for, when it last made progress, and a tick that a thread renews. An old
tick means that the process itself stands still; a fresh tick without progress means that its code does. All times are
time.monotonic(), which the processes of one host share. A process that nobody supervises writes nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

from drumline.parallel.attempt import Attempt
from drumline.signals import show_stacks

PROGRESS = struct.Struct("=dqq16s64s")
"""When it last made progress, process id, steps done, phase, what it waits for. A CHECKSUM follows, then the TICK."""
CHECKSUM, TICK = struct.Struct("=I"), struct.Struct("=d")
TICK_AT = PROGRESS.size + CHECKSUM.size
_TICK_EVERY_S = 0.1


class Pulse:
    """What one process says of itself. Nothing happens before `start`, which only supervised ranks call."""

    def __init__(self) -> None:
        self._record: mmap.mmap | None = None
        self._ended = threading.Event()
        self._phase, self._step, self._waits_for = "starting", 0, ""

    def start(self, attempt: Attempt, rank: int) -> None:
        """Begin to tick, and be ready to show this process's stacks."""
        show_stacks(attempt.stacks(rank).open("w", encoding="utf-8"))
        with attempt.pulse(rank).open("a+b") as file:
            file.truncate(TICK_AT + TICK.size)
            self._record = mmap.mmap(file.fileno(), 0)
        self._tick()
        self.at("starting", 0)
        threading.Thread(target=self._keep_ticking, name="pulse", daemon=True).start()

    def at(self, phase: str, step: int, *, waits_for: str = "") -> None:
        """Come to a phase with `step` steps done; each call is progress."""
        self._phase, self._step, self._waits_for = phase, step, waits_for
        self._write(time.monotonic())

    def still_there(self) -> None:
        """Progress within a phase that is allowed to take its time."""
        self._write(time.monotonic())

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Inside, this rank does nothing but wait for the others; of several, the outermost says what for.

        After an exception it stays said: who lost its peers was waiting for that. An empty text says that it works.
        """
        outer = self._waits_for
        self._wait((outer or what) if what else "")
        yield
        self._wait(outer)

    def stop(self) -> None:
        """No longer judged: what is left to do may take as long as it likes."""
        self.at("ending", self._step)
        self._ended.set()

    def _wait(self, what: str) -> None:
        if what != self._waits_for:
            self._waits_for = what
            self._write(None)

    def _write(self, progressed_s: float | None) -> None:
        if self._record is None:
            return
        if progressed_s is None:
            progressed_s = PROGRESS.unpack_from(self._record)[0]
        phase, waits_for = self._phase.encode(), self._waits_for.encode()
        fields = PROGRESS.pack(progressed_s, os.getpid(), self._step, phase, waits_for)
        self._record[:TICK_AT] = fields + CHECKSUM.pack(zlib.crc32(fields))

    def _tick(self) -> None:
        if self._record is not None:
            TICK.pack_into(self._record, TICK_AT, time.monotonic())

    def _keep_ticking(self) -> None:
        while not self._ended.wait(_TICK_EVERY_S):
            self._tick()


@cache
def own_pulse() -> Pulse:
    """This process's pulse."""
    return Pulse()


def waiting_for(what: str) -> AbstractContextManager[None]:
    """Say what this rank waits for the others in: `with waiting_for("the sum of the gradients"):`."""
    return own_pulse().waiting_for(what)


def working() -> AbstractContextManager[None]:
    """Within `waiting_for`: work of this rank's own that the others wait for."""
    return own_pulse().waiting_for("")
