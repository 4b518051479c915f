"""Guards the numbers of a run: losses that are not finite, losses that leap, and replicas that drift apart.

Every rank sees the same loss and gradient norm, so every rank comes to the same judgement without asking.
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
"""Losses whose median a leap is measured by, and how many there must be."""


class ReplicaDriftError(RunLostError):
    """A rank whose weights are no longer those of the others. Started again from a checkpoint, it has them again."""

    exit_code = EXIT_CRASHED


class Verdict(Enum):
    GOOD = "good"
    AGAIN = "compute it again"
    SKIP = "leave the update out"
    BACK = "go back to a checkpoint"


@dataclass(frozen=True, kw_only=True)
class GuardRules:
    """What to do about numbers that are wrong."""

    on_nonfinite: OnNonfinite = "skip"
    max_nonfinite: int = 5
    """Skipped steps in a row before the run ends."""
    spike_factor: float | None = None
    """A loss this many times the median of the last ones goes back to a checkpoint; None: never."""
    max_rollbacks: int = 5

    @property
    def may_go_back(self) -> bool:
        return self.on_nonfinite == "rollback" or self.spike_factor is not None


class Guard:
    """Judges each step of one run."""

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
        """Of the last steps, if leaps are watched for; checkpoints have them, so that a resumed run judges alike."""
        self.tried_again = False
        """Whether the present step is one that was not finite and is computed again."""
        self.in_a_row = 0
        """Skipped steps since the last good one."""
        self.skipped_steps = 0

    def judge(self, step: int, data_step: int, result: StepResult, *, rollbacks: int) -> Verdict:
        """step: counted from 0; data_step: whose data it took; rollbacks: how many the run has behind it"""
        if self._finite(result) and not self.tried_again and not self._leaps(result.loss):
            self.in_a_row = 0
            if self.rules.spike_factor is not None:
                self.losses.append(result.loss)
            return Verdict.GOOD
        from drumline.train.trouble import judge_trouble

        return judge_trouble(self, step, data_step, result, finite=self._finite(result), rollbacks=rollbacks)

    def _finite(self, result: StepResult) -> bool:
        scaler = self._precision.scaler
        # An overflow while float16's scaler looks for its scale is its way of working, not a fault.
        searching = math.isfinite(result.loss) and scaler.is_enabled() and scaler.get_scale() >= 1.0
        return result.updated or searching

    def _leaps(self, loss: float) -> bool:
        factor = self.rules.spike_factor
        return factor is not None and len(self.losses) >= _ENOUGH and loss > factor * median(self.losses)
