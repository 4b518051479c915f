"""Guards the numbers of a run: losses that are not finite, losses that leap, and replicas that drift apart.

Every rank sees the same loss and gradient norm, so every rank comes to the same judgement without asking.
"""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from drumline.config import OnNonfinite
from drumline.data import Batches
from drumline.errors import EXIT_CRASHED, RunLostError, TrainingError
from drumline.parallel import World, waiting_for
from drumline.train.step import Precision, StepResult

_REMEMBERED, _ENOUGH = 64, 16
"""Losses whose median a leap is measured by, and how many there must be."""
_NAMES_SHOWN = 8


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
    check_replicas_every: int | None = None
    """Steps between comparisons of the ranks' weights, beside those before each checkpoint."""

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
        self._world, self._batches, self._precision, self._tell = world, batches, precision, tell
        self.losses: deque[float] = deque(maxlen=_REMEMBERED)
        """Of the last steps, if leaps are watched for; checkpoints have them, so that a resumed run judges alike."""
        self._tried_again = False
        self._in_a_row = 0
        self.skipped_steps = 0

    def judge(self, step: int, data_step: int, result: StepResult, *, rollbacks: int) -> Verdict:
        """step: counted from 0; data_step: whose data it took; rollbacks: how many the run has behind it"""
        if not self._finite(result):
            return self._not_finite(step, data_step, result, rollbacks)
        if self._tried_again:
            self._tried_again = False
            self._tell(
                f"step {step + 1:,}: finite when computed again: a passing fault of the hardware, nothing is lost",
                {"event": "computed again", "step": step + 1, "loss": result.loss},
            )
        self._in_a_row = 0
        if self._leaps(result.loss):
            usual = median(self.losses)
            what = f"loss {result.loss:.4g}, {result.loss / usual:.1f} times the median {usual:.4g} of the last steps"
            self._tell(f"warning: step {step + 1:,}: {what}", {"event": "loss spike", "step": step + 1, "what": what})
            return self._back(step, what, data_step, rollbacks)
        if self.rules.spike_factor is not None:
            self.losses.append(result.loss)
        return Verdict.GOOD

    def _finite(self, result: StepResult) -> bool:
        scaler = self._precision.scaler
        # An overflow while float16's scaler looks for its scale is its way of working, not a fault.
        searching = math.isfinite(result.loss) and scaler.is_enabled() and scaler.get_scale() >= 1.0
        return result.updated or searching

    def _leaps(self, loss: float) -> bool:
        factor = self.rules.spike_factor
        return factor is not None and len(self.losses) >= _ENOUGH and loss > factor * median(self.losses)

    def _not_finite(self, step: int, data_step: int, result: StepResult, rollbacks: int) -> Verdict:
        what = f"loss {result.loss}, gradient norm {result.grad_norm}"
        if not self._tried_again:
            # A step is a function of its data: computed again it gives the same, unless memory or a chip erred.
            self._tried_again = True
            where, documents = self._culprits(data_step, result)
            self._tell(
                f"warning: step {step + 1:,}: {what}: not finite {where}; computing it again; documents: {documents}",
                {"event": "not finite", "step": step + 1, "where": where, "documents": documents, "what": what},
            )
            return Verdict.AGAIN
        self._tried_again = False
        if self.rules.on_nonfinite == "rollback":
            return self._back(step, what, data_step, rollbacks)
        self._in_a_row += 1
        self.skipped_steps += 1
        if self.rules.on_nonfinite == "halt" or self._in_a_row >= self.rules.max_nonfinite:
            raise self._give_up(step, f"{what}, {self._in_a_row} such steps in a row", data_step)
        self._tell(
            f"warning: step {step + 1:,}: {what}: not finite again, the step was skipped",
            {"event": "skipped", "step": step + 1, "what": what},
        )
        return Verdict.SKIP

    def _back(self, step: int, what: str, data_step: int, rollbacks: int) -> Verdict:
        if rollbacks >= self.rules.max_rollbacks:
            raise self._give_up(step, f"{what}, after {rollbacks} rollbacks", data_step)
        return Verdict.BACK

    def _give_up(self, step: int, what: str, data_step: int) -> TrainingError:
        return TrainingError(
            f"step {step + 1:,}: {what}; its documents: {_shown(self._batches.names(data_step))}",
            fix="lower --lr, use --dtype bfloat16 or float32, or take those documents out",
            told=not self._world.is_main,  # every rank sees the same numbers
        )

    def _culprits(self, data_step: int, result: StepResult) -> tuple[str, str]:
        """Whose loss it was, and the documents of their micro-batches; every rank asks at the same point."""
        share = self._batches.plan.share(self._world.rank, self._world.size)
        finite = math.isfinite(result.own_loss)
        names = [] if finite else [name for index in share for name in self._batches.names(data_step, index)]
        with waiting_for("the search for whose loss is not finite"):
            told = self._world.gather([socket.gethostname(), finite, names])
        guilty = [(rank, host, named) for rank, (host, fine, named) in enumerate(told) if not fine]
        if not guilty:
            return "in the gradient, though each rank's loss is finite", _shown(self._batches.names(data_step))
        where = "on " + ", ".join(f"rank {rank} ({host})" for rank, host, _ in guilty)
        return where, _shown(list(dict.fromkeys(name for _, _, named in guilty for name in named)))


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "not known") + more
