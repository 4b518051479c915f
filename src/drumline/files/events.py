"""Events for a program that follows this one: whoever launched it or drills it. People are told elsewhere, in words."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

EVENTS = "DRUMLINE_EVENTS"
"""Environment variable: the file or FIFO that gets each event as a line of JSON, from all processes of a command."""


def publish(event: dict[str, Any]) -> None:
    """Append one event where DRUMLINE_EVENTS says; nowhere if it is not set or nobody reads there any more."""
    path = os.environ.get(EVENTS)
    if not path:
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)  # a FIFO without a reader is refused
        try:
            os.write(descriptor, json.dumps(event).encode() + b"\n")  # at once: lines of two processes do not mix
        finally:
            os.close(descriptor)
