"""A checkpoint -> text and held-out loss."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.generate.inference import evaluate_run, sample_run
    from drumline.generate.sample import SampleConfig, can_write, generate, sample_text

__getattr__, __dir__, __all__ = public(__name__, __file__)
