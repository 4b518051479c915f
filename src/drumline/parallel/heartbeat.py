"""What a rank tells its supervisor: what it does and what it waits for. No effect without a supervisor."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

ATTEMPT = "DRUMLINE_ATTEMPT"
"""The variable with the folder of the current attempt, see attempt.py."""


PHASES = ("data", "forward", "backward", "wait", "optimizer", "save", "other")
"""What the time of a step consists of."""
_PHASE_OF = {"compute": "forward", "compiling": "forward", "exchange": "wait"}


class Clock:
    """Seconds that this rank spends in each phase, as its host sees them."""

    def __init__(self) -> None:
        self._phase, self._since = "other", time.perf_counter()
        self._seconds, self._steps = dict.fromkeys(PHASES, 0.0), 0

    def enter(self, phase: str) -> None:
        """End the current phase. What is no phase of a step, such as an evaluation, is not counted."""
        now = time.perf_counter()
        if self._phase in self._seconds:
            self._seconds[self._phase] += now - self._since
        self._steps += phase == "optimizer" != self._phase
        self._phase, self._since = phase, now

    def lap(self) -> list[float]:
        """Seconds per step in each of PHASES, since the last lap."""
        self.enter(self._phase)
        means = [seconds / max(1, self._steps) for seconds in self._seconds.values()]
        self._seconds, self._steps = dict.fromkeys(PHASES, 0.0), 0
        return means


class Pulse:
    """Of a process without a supervisor; `supervised.SupervisedPulse` is the same for a supervised rank."""

    is_supervised = False
    """Whether a drumline launcher watches this process."""

    def __init__(self) -> None:
        self.clock = Clock()

    @property
    def started_again(self) -> bool:
        """Whether this is a restart by the launcher."""
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def start(self, rank: int) -> None:
        """Start ticking, and be ready to dump this process's stacks."""

    def promise_an_ending(self) -> None:
        """These ranks train: one that exits before the end of the run has failed."""

    def tell_run_dir(self, path: Path) -> None:
        """Report the run folder that rank 0 chose."""

    def at(self, phase: str, step: int, *, waits_for: str = "") -> None:
        """Enter a phase with `step` completed steps; each call counts as progress."""
        self.clock.enter(_PHASE_OF.get(phase, phase))

    def still_there(self) -> None:
        """Progress within a phase that may take long."""

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Inside, this rank only waits for other ranks; if nested, the outermost text counts.

        After an exception the text stays: a rank that lost its peers was waiting for that. An empty text: it works.
        """
        return nullcontext()

    def stop(self) -> None:
        """No longer watched for hangs: what is left to do may take any time."""


@cache
def own_pulse() -> Pulse:
    """This process's pulse."""
    if ATTEMPT not in os.environ:
        return Pulse()
    from drumline.parallel.supervised import SupervisedPulse

    return SupervisedPulse(Path(os.environ[ATTEMPT]))


def waiting_for(what: str) -> AbstractContextManager[None]:
    """Declare what this rank waits for: `with waiting_for("the sum of the gradients"):`."""
    return own_pulse().waiting_for(what)


def working() -> AbstractContextManager[None]:
    """Inside `waiting_for`: work of this rank that the others wait for."""
    return own_pulse().waiting_for("")
