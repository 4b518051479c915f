"""When something is due."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The length of a run and the steps between what happens in it; `step` counts from 1."""

    total_steps: int
    log_every: int = 10
    eval_every: int
    save_every: Fraction
    """May be a fraction, as of an epoch: due at the first step that reaches a multiple of it."""
    snapshot_every: int = 0
    """Copies of the run in memory; 0: none."""
    compare_every: int = 0
    """Comparisons of the ranks' weights, beside those before each save; 0: none."""

    def logs(self, step: int) -> bool:
        return due(step, Fraction(self.log_every), self.total_steps)

    def evaluates(self, step: int) -> bool:
        return due(step, Fraction(self.eval_every), self.total_steps)

    def saves(self, step: int) -> bool:
        return due(step, self.save_every, self.total_steps)

    def snapshots(self, step: int) -> bool:
        return self.snapshot_every > 0 and step % self.snapshot_every == 0

    def compares(self, step: int) -> bool:
        return self.compare_every > 0 and step % self.compare_every == 0


def due(step: int, every: Fraction, last: int) -> bool:
    """Whether `step`, counted from 1, is the first to reach a multiple of `every`, or the last."""
    return step == last or step // every > (step - 1) // every
