"""Batches -> steps -> a run."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.train.assembly import assembled
    from drumline.train.evaluation import Evaluation, evaluate
    from drumline.train.guard import GuardRules
    from drumline.train.loop import FitResult, Loop
    from drumline.train.pretraining import pretrain, set_up, train_here
    from drumline.train.setup import Intervals, Setup
    from drumline.train.step import Backward, Gradient, Objective, Precision, Step, StepResult, to_device
    from drumline.train.summary import write_report

__getattr__, __dir__, __all__ = public(__name__, __file__)
