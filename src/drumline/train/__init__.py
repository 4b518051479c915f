"""Batches -> steps -> a run."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.train.evaluation import Evaluation as Evaluation
    from drumline.train.evaluation import evaluate as evaluate
    from drumline.train.pretraining import pretrain as pretrain
    from drumline.train.step import Backward as Backward
    from drumline.train.step import Precision as Precision
    from drumline.train.step import to_device as to_device
    from drumline.train.step import train_step as train_step
    from drumline.train.trainer import Trainer as Trainer

__getattr__, __dir__, __all__ = public(__name__, __file__)
