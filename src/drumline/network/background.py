"""Calls that may never return, in threads that can be abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """A call in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of a call that may never return; TimeoutError after `seconds`, and the call is abandoned."""
    future = in_background(work)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # raised by the call itself
            raise
        raise TimeoutError(f"no response within {seconds:.0f} s") from None
