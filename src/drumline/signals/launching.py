"""How launchers and the ranks they start answer signals."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from drumline.signals.handling import STOP_SIGNALS, handling

SHOW_STACKS = signal.SIGUSR2
"""Asks a rank to dump its stacks."""


@contextmanager
def counting(then: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """A list to which each signal is appended; then `then` is called, which may raise."""
    stops: list[int] = []

    def count(signum: int, frame: Any) -> None:
        stops.append(signum)
        then()

    with handling(count):
        yield stops


def start_afresh() -> None:
    """Restore default signal handling, whatever this process was forked from."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def show_stacks(file: TextIO) -> None:
    """On SHOW_STACKS, write the stacks of all threads to this file."""
    faulthandler.register(SHOW_STACKS, file=file, all_threads=True)


@contextmanager
def blocked() -> Iterator[None]:
    """Block signals; they stay blocked in processes started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
