"""Any model and any dataset -> a run, from a script."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.trainer.callbacks import Callback
    from drumline.trainer.scripts import pretrain
    from drumline.trainer.trainer import Trainer

__getattr__, __dir__, __all__ = public(__name__, __file__)
