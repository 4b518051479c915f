"""Tokens -> logits and loss."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.model.build import build_model as build_model
    from drumline.model.build import token_objective as token_objective
    from drumline.model.gpt import GPT as GPT
    from drumline.model.gpt import CausalSelfAttention as CausalSelfAttention
    from drumline.model.gpt import KVCache as KVCache
    from drumline.model.gpt import RMSNorm as RMSNorm
    from drumline.model.gpt import TransformerBlock as TransformerBlock
    from drumline.model.loss import IGNORED as IGNORED
    from drumline.model.loss import by_parts as by_parts
    from drumline.model.loss import cross_entropy_in_place_reference as cross_entropy_in_place_reference
    from drumline.model.loss import linear_cross_entropy as linear_cross_entropy
    from drumline.model.loss import scaled_gradients as scaled_gradients
    from drumline.model.positions import one_before as one_before

__getattr__, __dir__, __all__ = public(__name__, __file__)
