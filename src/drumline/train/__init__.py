"""Batches -> steps -> a run."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.train.evaluation import Evaluation, evaluate
    from drumline.train.pretraining import pretrain, train_here
    from drumline.train.step import Backward, Precision, Step, to_device
    from drumline.train.trainer import Trainer

__getattr__, __dir__, __all__ = public(__name__, __file__)
