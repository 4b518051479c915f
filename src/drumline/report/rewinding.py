"""The records of a run that is resumed, cut back to where it goes on."""

from __future__ import annotations

import os
from pathlib import Path

from drumline.report.records import parsed


def forget_after(path: Path, step: int) -> None:
    """Drop the records of steps that a resumed run will do again, so that none appears twice.

    Records lie in the order of their steps, so those are the file's end. Cutting it off is done at once or not at all,
    and needs no room on the disk.
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
