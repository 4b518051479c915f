"""Checks the loss and gradient of each step: NaN and Inf, loss spikes, and replicas whose weights differ.

Every rank sees the same loss and gradient norm, so all ranks decide the same without communication.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from drumline.config import OnNonfinite
from drumline.data import Batches
from drumline.errors import EXIT_CRASHED, RunLostError
from drumline.parallel import World
from drumline.train.step import Precision, StepResult

_REMEMBERED, _ENOUGH = 64, 16
"""Number of recent losses whose median defines a spike, and how many there must be."""


class ReplicaDriftError(RunLostError):
    """A rank whose weights differ from the others'. A restart from a checkpoint makes them equal again."""

    exit_code = EXIT_CRASHED


class Verdict(Enum):
    GOOD = "good"
    AGAIN = "compute it again"
    SKIP = "leave the update out"
    BACK = "go back to a checkpoint"


@dataclass(frozen=True, kw_only=True)
class GuardRules:
    """What to do about NaN, Inf and loss spikes."""

    on_nonfinite: OnNonfinite = "skip"
    max_nonfinite: int = 5
    """Number of consecutive skipped steps before the run fails."""
    spike_factor: float | None = None
    """Roll back if the loss exceeds this many times the recent median; None: never."""
    max_rollbacks: int = 5

    @property
    def may_go_back(self) -> bool:
        return self.on_nonfinite == "rollback" or self.spike_factor is not None


class Guard:
    """Judges each step of a run."""

    def __init__(
        self,
        rules: GuardRules,
        world: World,
        batches: Batches,
        precision: Precision,
        *,
        tell: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.rules = rules
        self.world, self.batches, self.tell = world, batches, tell
        self._precision = precision
        self.losses: deque[float] = deque(maxlen=_REMEMBERED)
        """Losses of recent steps, if spikes are detected; in checkpoints, so that a resumed run decides the same."""
        self.tried_again = False
        """Whether the current step had NaN or Inf and is being recomputed."""
        self.in_a_row = 0
        """Skipped steps since the last good one."""
        self.skipped_steps = 0

    def judge(self, step: int, data_step: int, result: StepResult, *, rollbacks: int) -> Verdict:
        """step: counted from 0; data_step: the step whose data it used; rollbacks: number so far"""
        if self._finite(result) and not self.tried_again and not self._leaps(result.loss):
            self.in_a_row = 0
            if self.rules.spike_factor is not None:
                self.losses.append(result.loss)
            return Verdict.GOOD
        from drumline.train.trouble import judge_trouble

        return judge_trouble(self, step, data_step, result, finite=self._finite(result), rollbacks=rollbacks)

    def _finite(self, result: StepResult) -> bool:
        scaler = self._precision.scaler
        # Overflows are part of how float16's loss scaler finds its scale, not a fault.
        searching = math.isfinite(result.loss) and scaler.is_enabled() and scaler.get_scale() >= 1.0
        return result.updated or searching

    def _leaps(self, loss: float) -> bool:
        factor = self.rules.spike_factor
        return factor is not None and len(self.losses) >= _ENOUGH and loss > factor * median(self.losses)
