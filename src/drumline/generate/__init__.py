"""A checkpoint -> generated text and validation loss.

sample: how tokens are sampled, from any model that returns logits; samples: of a model in training (together: of a
sharded one). streaming: their
text as it grows; stops: up to a string. engine: many texts at the same time, each in one of the slots. conversation:
turn by turn. loading: the model of a run's newest checkpoint. inference: generate text with a run, or evaluate it;
storing: how its weights lie in memory.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.generate.conversation import Conversation
    from drumline.generate.engine import Engine, Reason, Request, Scored, make_engine, scored_tokens
    from drumline.generate.inference import WritingRun, evaluate_run, held_out, sample_run, scoring_run, writing_run
    from drumline.generate.loading import FoundRun, LoadedRun, find_run, load_run
    from drumline.generate.sample import VISIBLE, SampleConfig, can_write, choose, generate
    from drumline.generate.samples import write_sample
    from drumline.generate.stops import StoppingText
    from drumline.generate.together import text_of_all, write_together

__getattr__, __dir__, __all__ = public(__name__, __file__)
