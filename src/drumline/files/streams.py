"""Standard streams that are closed, or accept no more."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress


def open_closed_streams() -> None:
    """Open missing standard streams on /dev/null: otherwise the next opened file would take their descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def stdout_is_unread() -> bool:
    """Whether nobody reads stdout any more, as after `| head -1`; what is still to be written is then discarded."""
    with suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            forget_stdout()
            return True
    return False


def forget_stdout() -> None:
    """Discard what stdout did not accept: Python's final flush would make a successful run exit with 120.

    A thread that still hangs in a write keeps the old stdout for itself, and whoever flushes that would wait for it.
    """
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        sys.stdout = sys.__stdout__ = open(nowhere, "w", encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
