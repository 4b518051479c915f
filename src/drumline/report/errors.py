"""Prints a user-facing error, the problem and the fix, to stderr, on one rank."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from drumline.errors import DrumlineError
from drumline.files import publish
from drumline.report.records import to_stderr

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Set by torchrun: the file whose message it shows for this rank in its list of failures."""


def report_error(error: DrumlineError, code: int | None = None) -> int:
    """Print an error unless another rank does; returns the exit code of this rank: the error's, or `code`."""
    if error.reported and _ERROR_FILE in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
        # torchrun prints a paragraph about every rank that fails. All ranks have this error, so local rank 0 fails on
        # every host, and torchrun's own exit code stays the same.
        return 0
    if is_to_tell():
        tell(error)
        _explain_to_torchrun(error)
    return error.exit_code if code is None else code


def is_to_tell() -> bool:
    """Whether this rank prints an error. Before ranks are connected, all ranks of a host fail in the same way."""
    connected = "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized()
    return connected or os.environ.get("LOCAL_RANK", "0") == "0"


def tell(error: DrumlineError) -> None:
    """Print the problem and the fix to stderr, unless another rank does."""
    if not error.reported:
        to_stderr(_text(error))
        publish({"event": "error", "time": time.time(), **error.as_dict()})


def _text(error: DrumlineError) -> str:
    lines = [f"error: {' '.join(error.problem.split())}", *(f"  {line}" for line in error.details)]
    return "\n".join([*lines, f"  fix: {' '.join(error.fix.split())}"])


def _explain_to_torchrun(error: DrumlineError) -> None:
    """Let torchrun's list of failures, which comes last, show the error instead of a link to its manual."""
    if path := os.environ.get(_ERROR_FILE):
        message = {"message": _text(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
