"""A checkpoint -> text and held-out loss."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.generate.inference import evaluate_run as evaluate_run
    from drumline.generate.inference import sample_run as sample_run
    from drumline.generate.sample import SampleConfig as SampleConfig
    from drumline.generate.sample import generate as generate

__getattr__, __dir__, __all__ = public(__name__, __file__)
