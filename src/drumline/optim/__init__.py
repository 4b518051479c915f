"""Gradients -> weights."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.optim.formula import lr_formula
    from drumline.optim.optimizers import learning_rate, make_optimizer, parameters_by_kind, scaled
    from drumline.optim.plugin import checked_optimizer
    from drumline.optim.size import checkpoints_bytes, state_size

__getattr__, __dir__, __all__ = public(__name__, __file__)
