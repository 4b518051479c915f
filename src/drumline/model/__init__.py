"""Tokens -> logits and loss.

gpt: the model, with positions and loss; recomputing: its activation checkpointing. build: of a config; plugin: of one's
own; deferred: without initializing. named: GPTModel. flops: sizes.
"""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.model.build import build_model, token_objective
    from drumline.model.deferred import uninitialized
    from drumline.model.flops import flops_per_token, num_parameters
    from drumline.model.gpt import GPT, CausalSelfAttention, KVCache, LayerCache, RMSNorm, TransformerBlock
    from drumline.model.loss import IGNORED, WATCHERS, by_parts, cross_entropy_reference, linear_cross_entropy, rescaled
    from drumline.model.modern import one_before, rotate
    from drumline.model.named import GPTLike, GPTModel
    from drumline.model.plugin import check_loss, checked_plugin
    from drumline.model.positions import starts

__getattr__, __dir__, __all__ = public(__name__, __file__)
