"""Gradients -> weights."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.optim.optimizers import learning_rate as learning_rate
    from drumline.optim.optimizers import make_optimizer as make_optimizer
    from drumline.optim.optimizers import parameters_by_kind as parameters_by_kind
    from drumline.optim.optimizers import scaled as scaled

__getattr__, __dir__, __all__ = public(__name__, __file__)
