"""More processes of this host that encode the same text."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from drumline.data import Recipe
from drumline.errors import DrumlineError


@dataclass
class Lost:
    """How workers ended that did not end well."""

    codes: list[int] = field(default_factory=list)

    def note(self) -> str:
        names = [f"signal {-code}" if code < 0 else f"exit code {code}" for code in self.codes]
        return f"; {len(names)} of the workers died ({', '.join(names)}), others did their part" if names else ""


@contextmanager
def working(recipe: Recipe, out: Path, count: int) -> Iterator[Lost]:
    """More processes that encode, until the end of the block."""
    context, lost = multiprocessing.get_context("spawn"), Lost()
    processes = [context.Process(target=_work, args=(recipe, out), name=f"worker-{n}") for n in range(count)]
    for process in processes:
        process.start()
    try:
        yield lost
        for process in processes:
            process.join()
            if process.exitcode:
                lost.codes.append(process.exitcode)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(recipe: Recipe, out: Path) -> None:
    from drumline.encoding.parts import encode_what_is_left

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        encode_what_is_left(recipe, out)
    except (DrumlineError, OSError, KeyboardInterrupt):
        sys.exit(1)  # the first process meets it too, and says it


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
