"""Truncates the records of a run to the step that it resumes from, and sets damaged lines aside."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from drumline.files import flush
from drumline.report.records import parsed

_NAMED = 5
"""Of many damaged lines, so many are named by their numbers."""


def forget_after(path: Path, step: int, *, warn: Callable[[str], None]) -> None:
    """Drop the records of steps that a resumed run will repeat, so that none appears twice.

    Records are in the order of steps, so these are the end of the file. Truncating is atomic and needs no disk space.
    A damaged line, by a torn write or an editor, is moved to a file beside: it must not keep a run from resuming.
    """
    content = path.read_bytes() if path.is_file() else b""
    good: list[bytes] = []
    damaged: dict[int, bytes] = {}
    end = kept = 0
    repeated = False
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        end += len(line)
        record = parsed(line)
        if record is None and line.endswith(b"\n"):
            damaged[number] = line
        repeated = repeated or (record is not None and record["step"] > step)
        if record is not None and line.endswith(b"\n") and not repeated:
            good.append(line)
            kept = end
    if kept < len(content):
        os.truncate(path, kept)
    if damaged:
        aside = path.with_name(f"{path.name}.damaged")
        is_moved = _set_aside(path, aside, b"".join(good), b"".join(damaged.values()))
        warn(_warning(path, list(damaged), f"moved to {aside}" if is_moved else "ignored"))


def _set_aside(path: Path, aside: Path, good: bytes, damaged: bytes) -> bool:
    """First copied, then removed; False: the disk has no room, and they stay where they are."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("ab") as file:
            file.write(damaged)
        flush(aside)
        new.write_bytes(good)
        flush(new)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        return False
    return True


def _warning(path: Path, numbers: Sequence[int], fate: str) -> str:
    named = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    lines, are, were = ("line", "is", "was") if len(numbers) == 1 else ("lines", "are", "were")
    return f"warning: {lines} {named}{more} of {path} {are} damaged and {were} {fate}"
