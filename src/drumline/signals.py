"""The signals that ask a run to stop, and the only place that handles any: each kind of process in a way of its own.

    who                     on the first signal                    on one more of the same kind
    the train command       ends at once (`end_at_once`)
    one that prepares text  KeyboardInterrupt, so that it tidies   the same
                            up (`raise_interrupts`)
    the training loop       stops after this step, all saved       ends at once; under a supervisor, which ends ranks
                            (`stopping`)                           that do not stop, it is ignored
    a supervisor, `launch`  asks its ranks or hosts to stop        ends them at once (`counting`)

A process that nohup started goes on without its terminal: where SIGHUP is ignored it stays so.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from drumline.errors import EXIT_INTERRUPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C, the system's way to end a process, SLURM's warning that time is up, and a terminal that was closed."""
SHOW_STACKS = signal.SIGUSR2
"""Asks a rank to show what it is doing."""

Handler = Callable[[int, Any], Any]


@contextmanager
def stopping(*, supervised: bool) -> Iterator[threading.Event]:
    """An event that is set when this process is asked to stop after the current step."""
    stop, before = threading.Event(), _handlers()

    def ask(signum: int, frame: Any) -> None:
        stop.set()
        # SLURM signals supervisor and ranks alike, and the supervisor passes it on: a second one is no second wish.
        signal.signal(signum, signal.SIG_IGN if supervised else before[signum])

    with _handling(ask):
        yield stop


@contextmanager
def counting(then: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """A list to which each signal adds itself, and then calls `then`, which may raise."""
    stops: list[int] = []

    def count(signum: int, frame: Any) -> None:
        stops.append(signum)
        then()

    with _handling(count):
        yield stops


@contextmanager
def raising() -> Iterator[None]:
    """Each signal is a KeyboardInterrupt."""
    with _handling(signal.default_int_handler):
        yield


def end_at_once() -> None:
    """From here on a signal ends this process: there is nothing to save yet."""
    _handle(_leave)


def raise_interrupts() -> None:
    """Where `end_at_once` was called: from here on there are files to tidy up, so a signal is a KeyboardInterrupt."""
    if signal.getsignal(signal.SIGTERM) is _leave:
        _handle(signal.default_int_handler)


def start_afresh() -> None:
    """Handle signals as a program that was just started does, whatever this process was forked from."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def show_stacks(file: TextIO) -> None:
    """On SHOW_STACKS, write all threads' stacks to this file."""
    faulthandler.register(SHOW_STACKS, file=file, all_threads=True)


@contextmanager
def blocked() -> Iterator[None]:
    """Signals wait; they stay blocked in processes that are started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    before = _handlers()
    _handle(handler)
    try:
        yield
    finally:
        for signum, former in before.items():
            signal.signal(signum, former)


def _handle(handler: Handler) -> None:
    for signum in _handlers():
        signal.signal(signum, handler)


def _handlers() -> dict[int, Any]:
    """What handles each signal that may be handled now: none in a thread, where Python does not allow it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    present = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    return {signum: now for signum, now in present.items() if (signum, now) != (signal.SIGHUP, signal.SIG_IGN)}


def _leave(signum: int, frame: Any) -> None:
    """End at once: an exception raised amid the imports of others may be caught there, and lost."""
    os.write(sys.stderr.fileno(), b"error: interrupted\n  fix: run the same command again\n")
    os._exit(EXIT_INTERRUPTED)
