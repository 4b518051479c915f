"""FusedGPT: a GPT that trains through fused_ops' kernels where they fit, and is a plain GPT everywhere else.

They fit a modern model (rotary positions, RMSNorm, normalised queries and keys, squared ReLU, no biases) without
dropout and shared key/value heads, in bfloat16 on a Hopper GPU. Weights stay float32 parameters with the names that a
GPT gives them, so optimizer, ranks and checkpoints see no difference; each forward casts them once. To train with
them: `--model drumline.fused_gpt:FusedGPT`.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.config import GPTConfig
from drumline.hardware import is_hopper
from drumline.model import GPT, KVCache, RMSNorm, TransformerBlock


class FusedGPT(GPT):
    """GPT's function, names and weights."""

    def hidden(self, input_ids: Tensor, *, documents: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        fits_in = input_ids.size(1) <= self.config.max_position_embeddings and input_ids.numel() % 128 == 0
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
        if documents is None and cache is None and fits_in and self.is_fused(input_ids.device, dtype):
            return _hidden(self, input_ids)
        return super().hidden(input_ids, documents=documents, cache=cache)

    def is_fused(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether training on this device, with products in this format, runs through the kernels."""
        return dtype == torch.bfloat16 and has_kernels(device) and fits(self.config)


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels were made for a device, and can be compiled."""
    return is_hopper(device) and importlib.util.find_spec("triton") is not None


@functools.cache
def fits(config: GPTConfig) -> bool:
    """Whether the kernels compute what this config describes: any option that they do not know is one too many."""
    known = GPTConfig(
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        d_model=config.d_model,
        d_ff=config.d_ff,
        tie_embeddings=config.tie_embeddings,
        init=config.init,
        norm_weights=config.norm_weights,
        softcap=config.softcap,
        value_tables=config.value_tables,
        rope_theta=config.rope_theta,
        positions="rope",
        norm="rmsnorm",
        activation="relu2",
        qk_norm=True,
        bias=False,
    )
    head_width = config.head_width
    return (
        config == known
        and config.kv_heads == config.n_heads
        and 16 <= head_width <= 256
        and head_width & (head_width - 1) == 0
        and config.d_model % 64 == 0
        and config.d_ff % 256 == 0
    )


def _hidden(model: GPT, input_ids: Tensor) -> Tensor:
    """As GPT.hidden: int64 (B, T) -> bf16 (B, T, D).

    What a part adds to the residual stream is added in the norm that follows, which has to read the stream anyway.
    """
    from drumline.fused_ops import add_rms_norm, embedding, qkv, relu2_mlp  # needs Triton

    assert model.rope is not None
    rope = model.rope[:, : input_ids.size(1)]
    ones = rope.new_ones(model.config.d_model)
    extra_values = model.extra_values(input_ids, embedding)
    x = embedding(input_ids, model.token_embedding.weight).flatten(0, 1)  # (N, D)
    delta: Tensor | None = None
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        attention, feed_forward = block.attention, block.feed_forward
        x, normed = add_rms_norm(x, delta, _weight(block.attention_norm, ones))
        q, k, v = qkv(
            normed,
            attention.qkv.weight.bfloat16(),
            _weight(attention.query_norm, ones),
            _weight(attention.key_norm, ones),
            rope,
            heads=attention.n_heads,
        )  # 3 x (B, H, T, W)
        if layer in extra_values:
            v = v + extra_values[layer]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = F.linear(y.transpose(1, 2).reshape(x.shape), attention.out.weight.bfloat16())  # (N, D)
        x, normed = add_rms_norm(x, attended, _weight(block.feed_forward_norm, ones))
        delta = relu2_mlp(normed, feed_forward.up.weight.bfloat16(), feed_forward.down.weight.bfloat16())
    return add_rms_norm(x, delta, _weight(model.final_norm, ones))[1].view(*input_ids.shape, -1)


def _weight(norm: nn.Module | None, ones: Tensor) -> Tensor:
    """What a norm multiplies with: its weight, or, where it has none, nothing."""
    assert isinstance(norm, RMSNorm)
    return norm.weight if norm.elementwise_affine else ones[: norm.normalized_shape[0]]
