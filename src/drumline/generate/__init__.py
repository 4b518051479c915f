"""A checkpoint -> generated text and validation loss.

sample: how tokens are sampled, from any model that returns logits. streaming: their text as it grows. loading: the
model of a run's newest checkpoint. inference: generate text with a run, or evaluate it.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.generate.inference import evaluate_run, held_out, sample_run, tokenizer_of
    from drumline.generate.loading import FoundRun, find_run, load_run
    from drumline.generate.sample import VISIBLE, SampleConfig, can_write, choose, generate

__getattr__, __dir__, __all__ = public(__name__, __file__)
