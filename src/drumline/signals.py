"""The signals that ask a run to stop, and the only place that handles signals; each kind of process in its own way.

    process                 first signal                           another one of the same kind
    the train command       exits immediately (`end_at_once`)
    while tokenizing text   KeyboardInterrupt, so that it cleans   the same
                            up (`raise_interrupts`)
    the training loop       stops after this step, with all saved  exits immediately; ignored under a supervisor,
                            (`stopping`)                           which kills ranks that do not stop
    a supervisor, `launch`  asks its ranks or hosts to stop        kills them (`counting`)

A process started by nohup continues without its terminal: if SIGHUP is ignored, it stays ignored.
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
"""Ctrl-C, the usual kill signal, SLURM's warning before the time limit, and a closed terminal."""
SHOW_STACKS = signal.SIGUSR2
"""Asks a rank to dump its stacks."""

Handler = Callable[[int, Any], Any]


@contextmanager
def stopping(*, supervised: bool) -> Iterator[threading.Event]:
    """An event that is set when this process is asked to stop after the current step."""
    stop, before = threading.Event(), _handlers()

    def ask(signum: int, frame: Any) -> None:
        stop.set()
        # SLURM signals both supervisor and ranks, and the supervisor forwards it: a second one is not a second request.
        signal.signal(signum, signal.SIG_IGN if supervised else before[signum])

    with _handling(ask):
        yield stop


@contextmanager
def counting(then: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """A list to which each signal is appended; then `then` is called, which may raise."""
    stops: list[int] = []

    def count(signum: int, frame: Any) -> None:
        stops.append(signum)
        then()

    with _handling(count):
        yield stops


@contextmanager
def raising() -> Iterator[None]:
    """Each signal raises KeyboardInterrupt."""
    with _handling(signal.default_int_handler):
        yield


def end_at_once() -> None:
    """From now on, a signal exits immediately: there is nothing to save yet."""
    _handle(_leave)


def raise_interrupts() -> None:
    """After `end_at_once`: from now on there are files to clean up, so a signal raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGTERM) is _leave:
        _handle(signal.default_int_handler)


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
    """The handlers that may be changed now: none in a thread, where Python does not allow it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    present = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    return {signum: now for signum, now in present.items() if (signum, now) != (signal.SIGHUP, signal.SIG_IGN)}


def _leave(signum: int, frame: Any) -> None:
    """Exit immediately: an exception raised during imports may be caught there, and lost."""
    os.write(sys.stderr.fileno(), b"error: interrupted\n  fix: run the same command again\n")
    os._exit(EXIT_INTERRUPTED)
