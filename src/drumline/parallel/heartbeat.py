"""What a rank tells its supervisor: what it does, what it waits for. A process without a supervisor says nothing."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

ATTEMPT = "DRUMLINE_ATTEMPT"
"""The variable that holds the folder of the present attempt to run all ranks, see attempt.py."""


class Pulse:
    """Of a process that nobody supervises; `supervised.SupervisedPulse` is the same for one that is a rank of ours."""

    is_supervised = False
    """Whether a launcher of ours watches this process, and ends it when need be."""

    @property
    def started_again(self) -> bool:
        """Whether this process's launcher has started its ranks before."""
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def start(self, rank: int) -> None:
        """Begin to tick, and be ready to show this process's stacks."""

    def promise_an_ending(self) -> None:
        """Say that these ranks are to train: one that exits before it comes to its end is at fault."""

    def tell_run_dir(self, path: Path) -> None:
        """Say which run folder rank 0 chose."""

    def at(self, phase: str, step: int, *, waits_for: str = "") -> None:
        """Come to a phase with `step` steps done; each call is progress."""

    def still_there(self) -> None:
        """Progress within a phase that is allowed to take its time."""

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Inside, this rank does nothing but wait for the others; of several, the outermost says what for.

        After an exception it stays said: who lost its peers was waiting for that. An empty text says that it works.
        """
        return nullcontext()

    def stop(self) -> None:
        """No longer judged: what is left to do may take as long as it likes."""


@cache
def own_pulse() -> Pulse:
    """This process's pulse."""
    if ATTEMPT not in os.environ:
        return Pulse()
    from drumline.parallel.supervised import SupervisedPulse

    return SupervisedPulse(Path(os.environ[ATTEMPT]))


def waiting_for(what: str) -> AbstractContextManager[None]:
    """Say what this rank waits for the others in: `with waiting_for("the sum of the gradients"):`."""
    return own_pulse().waiting_for(what)


def working() -> AbstractContextManager[None]:
    """Within `waiting_for`: work of this rank's own that the others wait for."""
    return own_pulse().waiting_for("")
