"""Truncates the records of a run to the step that it resumes from."""

from __future__ import annotations

import os
from pathlib import Path

from drumline.report.records import parsed


def forget_after(path: Path, step: int) -> None:
    """Drop the records of steps that a resumed run will repeat, so that none appears twice.

    Records are in the order of steps, so these are the end of the file. Truncating is atomic and needs no disk space.
    """
    content = path.read_bytes() if path.exists() else b""
    end = kept = 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        record = parsed(line)
        if record is not None and record["step"] > step:
            break
        if record is not None and line.endswith(b"\n"):
            kept = end
    if kept < len(content):
        os.truncate(path, kept)
