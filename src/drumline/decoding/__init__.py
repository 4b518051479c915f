"""A GPT on a GPU -> the next tokens of many texts, as fast as its weights and caches can be read.

state: what a step reads and writes, in tensors that stay where they are. step: a step of all texts, in plain PyTorch;
fused: with the kernels of linear and attending. sampling: a token for each text, by random numbers that are a function
of seed and place. graphs: a step is captured once, then replayed. slots: prompts in, tokens out; engine: requests in,
steps launched ahead of the tokens that the host has read.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.decoding.engine import AheadEngine

__getattr__, __dir__, __all__ = public(__name__, __file__)
