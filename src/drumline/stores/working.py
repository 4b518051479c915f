"""Calls that other threads make. Threads that never keep a process from ending, unlike those of an executor."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from functools import cache
from typing import Any, TypeVar

from drumline.parallel import own_pulse

T = TypeVar("T")
READERS, COMPUTERS = 64, 16
"""Threads that wait for a store: at 50 ms for an answer, so many make 1,280 requests a second. And those that make
micro-batches of what they have read."""
_ASK_S = 1.0


class Workers:
    """A few threads that make calls in the order in which these were submitted."""

    def __init__(self, count: int, name: str) -> None:
        self._left, self._name = count, name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        if self._left > 0:
            self._left -= 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call


@cache
def _workers(name: str, count: int, pid: int) -> Workers:
    return Workers(count, name)


def readers() -> Workers:
    """This process's: threads do not survive a fork."""
    return _workers("store reader", READERS, os.getpid())


def computers() -> Workers:
    return _workers("batch maker", COMPUTERS, os.getpid())


def waited(future: Future[T]) -> T:
    """The result of a call; a rank that waits for a store is alive for as long as the store is tried again."""
    while True:
        try:
            return future.result(timeout=_ASK_S)
        except NotYet:
            if future.done():
                return future.result()
            own_pulse().still_there()
