"""Tokens -> logits and loss."""

from typing import TYPE_CHECKING

from drumline.lazy import public

if TYPE_CHECKING:
    from drumline.model.build import build_model, token_objective
    from drumline.model.deferred import uninitialized
    from drumline.model.flops import flops_per_token, num_parameters
    from drumline.model.gpt import GPT, CausalSelfAttention, KVCache, LayerCache, RMSNorm, TransformerBlock
    from drumline.model.loss import IGNORED, by_parts, cross_entropy_reference, linear_cross_entropy, scaled_gradients
    from drumline.model.named import GPTLike, GPTModel
    from drumline.model.plugin import check_loss, checked_plugin
    from drumline.model.positions import one_before

__getattr__, __dir__, __all__ = public(__name__, __file__)
