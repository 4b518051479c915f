"""Writes to a place that may fail or hang for a while: in order, in a thread, so that a step never waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from drumline.signals import in_background

_SLOW_S, _KEPT = 10.0, 100_000
"""A disk that takes longer for a write is said to hang; so many writes may wait for it."""


class Writer:
    """Tells of the first write that fails or hangs, and when one works again. What waits is retried with the next.

    Beyond the newest `_KEPT` writes that wait, the oldest are lost.
    """

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._since = math.inf  # when the current write began; inf: there is none, and no thread
        self._lost, self.fails = 0, False

    def put(self, write: Callable[[], object]) -> None:
        """Write this as soon as possible, after what waits already."""
        with self._changed:
            self._waiting.append(write)
            if len(self._waiting) > _KEPT:
                self._waiting.popleft()
                self._lost += 1
            is_slow = time.monotonic() - self._since > _SLOW_S
        self._start()
        if is_slow:
            self._tell("it does not answer")

    def now(self, write: Callable[[], object]) -> bool:
        """Write this now; whether it should be retried."""
        try:
            write()
        except Exception as error:
            self._tell(str(getattr(error, "strerror", None) or error))
            return isinstance(error, OSError)
        self._tell("")
        return False

    def settle(self, within_s: float) -> int:
        """How many lines are not written, after trying so long, or longer while the disk answers."""
        if within_s:
            self._start()
        began = time.monotonic()
        with self._changed:
            while self._since < math.inf and (left_s := max(began, self._since) + within_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            return self._lost + len(self._waiting) + (self._since < math.inf)

    def _start(self) -> None:
        with self._changed:
            if self._since < math.inf or not self._waiting:
                return
            self._since = time.monotonic()
        in_background(self._run)

    def _run(self) -> None:
        fails = False
        while True:
            with self._changed:
                if fails or not self._waiting:
                    self._since = math.inf
                    self._changed.notify_all()
                    return
                self._since, write = time.monotonic(), self._waiting.popleft()
            if fails := self.now(write):
                with self._changed:
                    self._waiting.appendleft(write)

    def _tell(self, why: str) -> None:
        with self._changed:
            is_news, self.fails = self.fails != bool(why), bool(why)
        if is_news:
            retries = f"warning: cannot write to {self._what} ({why}); the run continues and retries"
            self._say(retries if why else f"{self._what} is writable again")
