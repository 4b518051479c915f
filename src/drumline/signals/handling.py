"""How a process that trains answers a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from drumline.errors import EXIT_INTERRUPTED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C, the usual kill signal, SLURM's warning before the time limit, and a closed terminal."""
Handler = Callable[[int, Any], Any]
T = TypeVar("T")
_STOPPING = b"\nsaving after this step, then stopping; press Ctrl-C again to stop immediately\n"


@contextmanager
def stopping(*, supervised: bool) -> Iterator[threading.Event]:
    """An event that is set when this process is asked to stop after the current step."""
    stop, before = threading.Event(), handlers()

    def ask(signum: int, frame: Any) -> None:
        stop.set()
        with suppress(OSError):
            os.write(sys.stderr.fileno(), b"" if supervised else _STOPPING)
        # SLURM signals both supervisor and ranks, and the supervisor forwards it: a second one is not a second request.
        signal.signal(signum, signal.SIG_IGN if supervised else before[signum])

    with handling(ask):
        yield stop


@contextmanager
def raising() -> Iterator[None]:
    """Each signal raises KeyboardInterrupt."""
    with handling(signal.default_int_handler):
        yield


def in_background(work: Callable[[], T]) -> Future[T]:
    """A call in a daemon thread. Waiting for its result, unlike a call into a library, can be interrupted."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future


def end_at_once() -> None:
    """From now on, a signal exits immediately: there is nothing to save yet."""
    _handle(_leave)


def raise_interrupts() -> None:
    """After `end_at_once`: from now on there are files to clean up, so a signal raises KeyboardInterrupt."""
    if signal.getsignal(signal.SIGTERM) is _leave:
        _handle(signal.default_int_handler)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Handle signals so, within this block."""
    before = handlers()
    _handle(handler)
    try:
        yield
    finally:
        for signum, former in before.items():
            signal.signal(signum, former)


def _handle(handler: Handler) -> None:
    for signum in handlers():
        signal.signal(signum, handler)


def handlers() -> dict[int, Any]:
    """The handlers that may be changed now: none in a thread, where Python does not allow it."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    present = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    return {signum: now for signum, now in present.items() if (signum, now) != (signal.SIGHUP, signal.SIG_IGN)}


def _leave(signum: int, frame: Any) -> None:
    """Exit immediately: an exception raised during imports may be caught there, and lost."""
    os.write(sys.stderr.fileno(), b"error: interrupted\n  fix: run the same command again\n")
    os._exit(EXIT_INTERRUPTED)
