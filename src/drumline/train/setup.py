"""What a run consists of, and its intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from drumline.checkpoint import Retention
from drumline.data import Batches
from drumline.files import RunFolder
from drumline.parallel import World
from drumline.train.guard import GuardRules
from drumline.train.step import Step, StepResult


@dataclass(kw_only=True)
class Setup:
    """What a run consists of, before its length is known."""

    folder: RunFolder
    world: World
    step: Step
    batches: Batches
    seed: int
    lr: Callable[[int], float | None] | None = None
    """Learning rate by step; None: leave the optimizer's own."""
    resume_from: str = "auto"
    allow_change: Sequence[str] = ()
    retention: Retention = field(default_factory=Retention)
    guard_rules: GuardRules = field(default_factory=GuardRules)
    facts: dict[str, Any] = field(default_factory=dict)
    """What must not change when a run is resumed, besides what every run has."""
    config_sha256: str = ""
    """Hash of the config, for the checkpoints' manifests."""
    flops_per_item: Callable[[int], float] | None = None
    """FLOPs per step, for MFU."""
    stepped: Callable[[int, StepResult], None] = lambda step, result: None
    """Called after each step with the number of completed ones."""
    evaluated: Callable[[int], None] = lambda step: None
    """Called after each evaluation."""
    last_text: Callable[[], str | None] = lambda: None
    """What a sharded model writes at the end of the run; all ranks call it. KeyboardInterrupt: one was asked to stop"""
    initialize: Callable[[], None] | None = None
    """Initializes the weights, if that was put off because they would be restored."""

    def all_facts(self) -> dict[str, Any]:
        plan = self.batches.plan
        batch = {"global_batch_size": plan.sequences, "batch_size": plan.micro_batch_size}
        return {"seed": self.seed, **batch, "items_per_epoch": self.batches.items, **self.facts}


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The length of a run and its intervals in steps; `step` counts from 1."""

    total_steps: int
    log_every: int | Fraction = 10
    eval_every: int | Fraction
    save_every: Fraction
    """May be fractional, as in epochs: due at the first step that reaches a multiple."""
    snapshot_every: int | None = 0
    """Steps between in-memory snapshots; 0: none; None: as often as costs little."""
    snapshot_copies: int = 1
    compare_every: int = 0
    """Steps between comparisons of the ranks' weights, besides those before each save; 0: none."""

    def logs(self, step: int) -> bool:
        return due(step, Fraction(self.log_every), self.total_steps)

    def evaluates(self, step: int) -> bool:
        return due(step, Fraction(self.eval_every), self.total_steps)

    def saves(self, step: int) -> bool:
        return due(step, self.save_every, self.total_steps)

    def compares(self, step: int) -> bool:
        return self.compare_every > 0 and step % self.compare_every == 0


def due(step: int, every: Fraction, last: int) -> bool:
    """Whether `step`, counted from 1, is the first to reach a multiple of `every`, or the last step."""
    return step == last or step // every > (step - 1) // every
