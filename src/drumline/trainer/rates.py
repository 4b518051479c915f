"""The learning rate of each step: the optimizer's own, a function of the step, or a torch scheduler; scaled or not.

Whatever sets it, the rate of step k depends on k alone: a resumed run replays its scheduler, and nothing is saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drumline.config import ScaleLr
from drumline.errors import ConfigError

ScheduleUnit = Literal["step", "epoch"]


class Rates:
    """Sets the learning rates of every step; given to the loop as its `lr`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        function: Callable[[int], float] | None = None,
        scheduler: LRScheduler | None = None,
        steps_per_unit: Fraction = Fraction(1),
        factor: float = 1.0,
    ) -> None:
        """
        function:       step -> learning rate of every group
        scheduler:      for this optimizer; stepped once per unit
        steps_per_unit: steps of the run per step of the scheduler
        factor:         what every rate is multiplied by
        """
        if function is not None and scheduler is not None:
            raise ConfigError("lr and scheduler both set the learning rate", fix="give one of the two")
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau depends on past losses, so a resumed run could not repeat its rates",
                fix="use a scheduler that depends on the step alone, such as CosineAnnealingLR, or lr=function",
            )
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ConfigError(
                "the scheduler changes another optimizer than the one that Trainer has",
                fix="create the scheduler with the optimizer that you give to Trainer",
            )
        self._optimizer, self._function, self._scheduler = optimizer, function, scheduler
        self._steps_per_unit, self.factor = steps_per_unit, factor
        self._own = [dict(group, params=[]) for group in optimizer.param_groups]
        self._first = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else {}
        self._at = 0
        self._unscaled = [group["lr"] for group in optimizer.param_groups]

    @property
    def by(self) -> str:
        """What sets the rates, in words; "" for the optimizer alone."""
        if self._function is not None:
            return "a function of the step"
        return type(self._scheduler).__name__ if self._scheduler is not None else ""

    def __call__(self, step: int) -> float | None:
        """The rate of all groups; None: they are set already."""
        if self._function is not None:
            return self._function(step) * self.factor
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, self._unscaled, strict=True):
            group["lr"] = rate  # a scheduler computes the next rate from the last one
        if self._scheduler is not None:
            self._go_to(math.floor(step / self._steps_per_unit))
        self._unscaled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.factor
        return None

    def _go_to(self, unit: int) -> None:
        assert self._scheduler is not None
        if unit < self._at:  # the run has gone back to a checkpoint
            for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
                group.update({name: value for name, value in own.items() if name != "params"})
            self._scheduler.load_state_dict(copy.deepcopy(self._first))
            self._at = 0
        while self._at < unit:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns: steps are replayed here
            self._scheduler.step()
            self._at += 1


def scale_factor(scale_lr: ScaleLr, base_batch_size: int | None, *, global_batch_size: int) -> float:
    """What scale_lr multiplies learning rates by."""
    if (scale_lr == "none") != (base_batch_size is None):
        raise ConfigError(
            f"scale_lr {scale_lr} and base_batch_size {base_batch_size} belong together",
            fix='give both, as scale_lr="linear", base_batch_size=32, or neither',
        )
    ratio = global_batch_size / (base_batch_size or global_batch_size)
    return math.sqrt(ratio) if scale_lr == "sqrt" else ratio
