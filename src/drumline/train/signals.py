"""Signals that ask a run to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from drumline.parallel import is_supervised

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""All of them mean: stop after this step, with everything saved. SIGUSR1 is SLURM's warning that time is up."""


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Any of STOP_SIGNALS asks the loop to stop after the current step; one more of a kind stops at once, as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(signum: int, frame: Any) -> None:
        stop.set()
        # A supervisor ends ranks that do not stop. SLURM sends a signal to both, so that it comes here twice.
        signal.signal(signum, signal.SIG_IGN if is_supervised() else before[signum])

    before: dict[int, Any] = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    for signum in before:
        signal.signal(signum, ask)
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
