"""A supervised rank's heartbeat, written where its supervisor reads it.

One small record: phase, step, what it waits for, when it last made progress, and a tick that a thread renews. An old
tick means that the process itself is frozen; a fresh tick without progress means that its code hangs. All times are
time.monotonic(), which the processes of one host share.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from drumline.parallel.attempt import Attempt
from drumline.parallel.heartbeat import Pulse
from drumline.signals import show_stacks

PROGRESS = struct.Struct("=dqq16s64s")
"""Last progress, process id, completed steps, phase, what it waits for. A CHECKSUM follows, then the TICK."""
CHECKSUM, TICK = struct.Struct("=I"), struct.Struct("=d")
TICK_AT = PROGRESS.size + CHECKSUM.size
_TICK_EVERY_S = 0.1


def reserve_record(path: Path, size: int = TICK_AT + TICK.size) -> None:
    """Make a file with room for a heartbeat, or for so many bytes; OSError if there is none.

    A file that is only long enough gets its room when it is written: in a full /dev/shm, that kills with SIGBUS.
    """
    with path.open("a+b") as file:
        if sys.platform == "linux":
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


class SupervisedPulse(Pulse):
    """Of a supervised rank. It neither ticks nor writes a record before `start`."""

    is_supervised = True

    def __init__(self, folder: Path) -> None:
        """folder: of this rank's attempt"""
        super().__init__()
        self._attempt = Attempt(folder)
        self._record: mmap.mmap | None = None
        self._ended = threading.Event()
        self._phase, self._step, self._waits_for = "starting", 0, ""

    @property
    def started_again(self) -> bool:
        return self._attempt.number > 1

    def start(self, rank: int) -> None:
        show_stacks(self._stacks(rank))
        with suppress(OSError):  # there is no room: it goes on, but nobody watches it
            reserve_record(self._attempt.pulse(rank))
            with self._attempt.pulse(rank).open("r+b") as file:
                self._record = mmap.mmap(file.fileno(), 0)
        self._tick()
        self.at("starting", 0)
        threading.Thread(target=self._keep_ticking, name="pulse", daemon=True).start()

    def promise_an_ending(self) -> None:
        with suppress(OSError):
            self._attempt.to_end.touch()

    def tell_run_dir(self, path: Path) -> None:
        with suppress(OSError):
            self._attempt.write(self._attempt.run_dir, str(path.absolute()))

    def at(self, phase: str, step: int, *, waits_for: str = "") -> None:
        super().at(phase, step)
        self._phase, self._step, self._waits_for = phase, step, waits_for
        self._write(time.monotonic())

    def still_there(self) -> None:
        self._write(time.monotonic())

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        outer = self._waits_for
        self._wait((outer or what) if what else "")
        yield
        self._wait(outer)

    def stop(self) -> None:
        self.at("ending", self._step)
        self._ended.set()

    def _stacks(self, rank: int) -> TextIO:
        try:
            return self._attempt.stacks(rank).open("w", encoding="utf-8")
        except OSError:
            return open(os.devnull, "w", encoding="utf-8")

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
