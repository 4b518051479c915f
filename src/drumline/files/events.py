"""Events for programs that follow this one, such as launchers and the drill. Users get messages instead."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from drumline.files.journal import EVENTS


def publish(event: dict[str, Any]) -> None:
    """Append one event to DRUMLINE_EVENTS; no effect if it is not set or nobody reads it."""
    path = os.environ.get(EVENTS)
    if not path:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)  # fails for a FIFO without a reader
        try:
            os.write(descriptor, json.dumps(event).encode() + b"\n")  # one call, so that lines do not mix
        finally:
            os.close(descriptor)
