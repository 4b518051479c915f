"""An error for people: what is wrong and what to do, on stderr, from one rank."""

from __future__ import annotations

import os
import sys
import time

from drumline.errors import DrumlineError
from drumline.files import publish
from drumline.report.records import to_stderr


def is_to_tell() -> bool:
    """Whether this rank prints an error. Until the ranks are connected, those of a host make the same mistakes."""
    connected = "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized()
    return connected or os.environ.get("LOCAL_RANK", "0") == "0"


def tell(error: DrumlineError) -> None:
    """What is wrong and what to do, on stderr; unless another rank tells it."""
    if not error.told:
        lines = [f"error: {' '.join(error.problem.split())}", *(f"  {line}" for line in error.details)]
        to_stderr("\n".join([*lines, f"  fix: {' '.join(error.fix.split())}"]))
        publish({"event": "error", "time": time.time(), **error.as_dict()})
