"""Calls that may never return, in threads that can be abandoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from drumline.signals import in_background

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of a call that may never return; TimeoutError after `seconds`, and the call is abandoned."""
    future = in_background(work)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # raised by the call itself
            raise
        raise TimeoutError(f"no response within {seconds:.0f} s") from None
