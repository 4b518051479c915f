"""What a script may do while it trains: a few moments, each a method of a Callback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.train import FitResult, StepResult

if TYPE_CHECKING:
    from drumline.trainer.trainer import Trainer


class Callback:
    """Override what you need. `trainer.model` is the model, without any wrapper; `step` counts completed steps."""

    def on_step(self, trainer: Trainer, step: int, result: StepResult) -> None:
        """After each step, on every rank. `result.loss` is the loss of the whole step."""

    def on_evaluate(self, trainer: Trainer, step: int, record: dict[str, Any]) -> None:
        """After each evaluation, on every rank. `record` has valid_loss and the metrics."""

    def on_save(self, trainer: Trainer, step: int, path: Path) -> None:
        """After a checkpoint was written and verified, on rank 0, during a later step: `path` is its folder."""

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        """At the end of fit, finished or stopped, on every rank."""


class Moments:
    """Calls the callbacks of a run at their moments."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self.step = 0
        self._saved: int | None = None

    def begin(self, saved_step: int | None) -> None:
        self._saved = saved_step

    def stepped(self, step: int, result: StepResult) -> None:
        self.step = step
        for each in self._callbacks:
            each.on_step(self._trainer, step, result)

    def evaluated(self, record: dict[str, Any]) -> None:
        for each in self._callbacks:
            each.on_evaluate(self._trainer, self.step, record)

    def saved(self, step: int | None) -> None:
        """Called with the newest step on disk, however often; only rank 0 knows it."""
        if step is not None and step != self._saved:
            self._saved = step
            for each in self._callbacks:
                each.on_save(self._trainer, step, self._trainer.folder.checkpoint(step))

    def ended(self, result: FitResult) -> None:
        for each in self._callbacks:
            each.on_end(self._trainer, result)
