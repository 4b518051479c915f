"""Prints a user-facing error, the problem and the fix, to stderr, on one rank."""

from __future__ import annotations

import os
import sys
import time

from drumline.errors import DrumlineError
from drumline.files import publish
from drumline.report.records import to_stderr


def is_to_tell() -> bool:
    """Whether this rank prints an error. Before ranks are connected, all ranks of a host fail in the same way."""
    connected = "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized()
    return connected or os.environ.get("LOCAL_RANK", "0") == "0"


def tell(error: DrumlineError) -> None:
    """Print the problem and the fix to stderr, unless another rank does."""
    if not error.reported:
        lines = [f"error: {' '.join(error.problem.split())}", *(f"  {line}" for line in error.details)]
        to_stderr("\n".join([*lines, f"  fix: {' '.join(error.fix.split())}"]))
        publish({"event": "error", "time": time.time(), **error.as_dict()})
