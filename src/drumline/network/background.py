"""Calls that may never end, in threads that can be left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """A call in a thread of its own, which the end of the process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of something that may never end; TimeoutError if it takes longer, and it is left behind."""
    future = in_background(work)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # it is the work's own
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
