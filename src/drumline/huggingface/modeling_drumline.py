"""A GPT trained with drumline, for transformers: AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).

This file lies beside the weights of models that have no class in transformers, and needs torch and transformers only.
Shapes: B sequences, T tokens in this call, S tokens attended to (T plus those in the cache), V vocabulary, D d_model,
H query heads, K key/value heads, W head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast


class DrumlineConfig(PretrainedConfig):
    """The architecture of a GPT of drumline; its names in config.json are those of drumline's settings."""

    model_type = "drumline"
    attribute_map = {  # noqa: RUF012 (transformers' own)
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
    }

    def __init__(
        self,
        vocab_size: int = 50257,
        max_position_embeddings: int = 1024,
        n_layers: int = 12,
        n_heads: int = 12,
        n_kv_heads: int = 12,
        d_model: int = 768,
        d_ff: int = 3072,
        head_dim: int = 64,
        positions: str = "rope",
        norm: str = "rmsnorm",
        activation: str = "relu2",
        qk_norm: bool = True,
        bias: bool = False,
        tie_embeddings: bool = False,
        norm_weights: bool = False,
        softcap: float = 0.0,
        value_tables: int = 0,
        smear: bool = False,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-6,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.n_layers, self.n_heads, self.n_kv_heads = n_layers, n_heads, n_kv_heads
        self.d_model, self.d_ff, self.head_dim = d_model, d_ff, head_dim
        self.positions, self.norm, self.activation = positions, norm, activation
        self.qk_norm, self.bias, self.norm_weights = qk_norm, bias, norm_weights
        self.tie_embeddings, self.softcap, self.value_tables, self.smear = tie_embeddings, softcap, value_tables, smear
        self.rope_theta, self.norm_eps, self.use_cache = rope_theta, norm_eps, use_cache
        super().__init__(**{**kwargs, "tie_word_embeddings": False})  # a tied head has no weights of its own


class DrumlineForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder-only transformer."""

    config_class = DrumlineConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _no_split_modules = ("Block",)

    def __init__(self, config: DrumlineConfig) -> None:
        super().__init__(config)
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model) if learned else None
        self.smear = nn.Parameter(torch.zeros(config.d_model)) if config.smear else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.value_tables = nn.ModuleList(
            nn.Embedding(config.vocab_size, config.n_kv_heads * config.head_dim)
            for _ in range(min(config.value_tables, (config.n_layers + 1) // 2))
        )
        self.final_norm = make_norm(config, config.d_model)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.token_embedding

    def get_output_embeddings(self) -> nn.Linear | None:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids, labels (not shifted): int64 (B, T); attention_mask: (B, S), 1 for a token, 0 for padding."""
        if past_key_values is None and (self.config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        cache, length = past_key_values, input_ids.size(1)
        if getattr(cache, "is_compileable", False):
            raise ValueError("this model needs a cache that grows: leave out cache_implementation")
        past = int(cache.get_seq_length()) if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device)[None]
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        x = self.embedded(input_ids, attention_mask, cache, past)  # (B, T, D)
        rope = None
        if self.position_embedding is None:
            rope = rotary(self.config, position_ids)  # 2 x (B or 1, 1, T, W / 2)
        else:
            x = x + self.position_embedding(position_ids)
        mask = attention_mask_for(attention_mask, length, past, input_ids.device)
        values = self.extra_values(input_ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, mask, cache, values.get(layer))
        if cache is not None and self.smear is not None:
            self.remember(input_ids, cache)
        x = self.final_norm(x[:, -logits_to_keep:] if logits_to_keep else x)
        logits = F.linear(x, self.token_embedding.weight if self.head is None else self.head.weight)
        if self.config.softcap:
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def embedded(self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None, past: int) -> Tensor:
        """Token embeddings and, with smear, a share of the previous token's: (B, T) -> (B, T, D)."""
        x = self.token_embedding(input_ids)
        if self.smear is None:
            return x
        last = cache.layers[len(self.blocks)].keys[:, 0, -1:, 0] if past else torch.zeros_like(input_ids[:, :1])
        before = self.token_embedding(torch.cat((last, input_ids[:, :-1]), dim=1))
        seen = torch.ones_like(input_ids)
        seen[:, 0] = int(past > 0)
        if attention_mask is not None:  # nothing comes from padding
            seen = seen * F.pad(attention_mask, (1, 0))[:, past : past + input_ids.size(1)]
        return x + self.smear * before * seen[..., None].to(x.dtype)

    def remember(self, input_ids: Tensor, cache: Cache) -> None:
        """Keep the ids in the cache, as one more layer: smear needs the last one, and beams are reordered with it."""
        if len(cache.layers) == len(self.blocks):
            cache.layers.append(DynamicLayer())
        ids = input_ids[:, None, :, None]  # (B, 1, T, 1)
        cache.layers[len(self.blocks)].update(ids, ids)

    def extra_values(self, input_ids: Tensor) -> dict[int, Tensor]:
        """Value embeddings of the first and the last layers: (B, T) -> (B, K, T, W) each."""
        width, count = self.config.head_dim, len(self.value_tables)
        found = [table(input_ids).unflatten(-1, (-1, width)).transpose(1, 2) for table in self.value_tables]
        last_layers = range(len(self.blocks) - count, len(self.blocks))
        return dict(zip(last_layers, found, strict=True)) | dict(enumerate(found))


class Block(nn.Module):
    """Attention, then feed-forward, each with pre-norm and a residual connection."""

    def __init__(self, config: DrumlineConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.d_model)
        self.attention = Attention(config, layer)
        self.feed_forward_norm = make_norm(config, config.d_model)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rope: Any, mask: Tensor | None, cache: Cache | None, values: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask, cache, values)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: DrumlineConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * config.head_dim, bias=config.bias)
        self.query_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None
        self.out = nn.Linear(config.n_heads * config.head_dim, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, rope: Any, mask: Tensor | None, cache: Cache | None, values: Tensor | None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)  # (B, H + 2 K, T, W)
        q, k, v = heads.split(self.heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if values is not None:
            v = v + values.type_as(v)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # 2 x (B, K, S, W)
        grouped = self.config.n_kv_heads != self.config.n_heads
        causal = mask is None and q.size(2) > 1
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The feed-forward layers."""

    def __init__(self, config: DrumlineConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias) if config.activation == "swiglu" else None
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        if self.activation == "relu2":
            return self.down(F.relu(self.up(x)).square())
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.activation == "gelu" else "none"))


class RMSNorm(nn.RMSNorm):
    def __init__(self, width: int, config: DrumlineConfig) -> None:
        super().__init__(width, eps=config.norm_eps, elementwise_affine=config.norm_weights)


def make_norm(config: DrumlineConfig, width: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(width, config)
    return nn.LayerNorm(width, config.norm_eps, elementwise_affine=config.norm_weights, bias=config.bias)


def rotary(config: DrumlineConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles: (B, T) -> 2 x float32 (B, 1, T, W / 2)."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=position_ids.device)
    angles = position_ids[:, None, :, None].float() / config.rope_theta ** (pairs / config.head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + W / 2): (B, H, T, W)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def attention_mask_for(attention_mask: Tensor | None, length: int, past: int, device: torch.device) -> Tensor | None:
    """True where a query may attend to a key: (B, 1, T, S); None if plain causal attention is enough."""
    if attention_mask is None and (past == 0 or length == 1):
        return None
    queries = torch.arange(past, past + length, device=device)[:, None]
    keys = torch.arange(past + length, device=device)[None]
    mask = (keys <= queries)[None, None]  # (1, 1, T, S)
    if attention_mask is None:
        return mask
    return (mask & attention_mask[:, None, None].bool()) | (keys == queries)  # padding attends to itself
