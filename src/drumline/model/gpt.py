"""GPT: tokens (B, T) -> logits (B, T, V). The only file that knows the model's internals.

Two families, of which `GPTConfig` can combine all parts. Classic, identical to GPT-2: learned positions, LayerNorm,
GELU, biases, and a tied output head. Modern: rotary positions, RMSNorm, QK norm, grouped-query attention, SwiGLU or
squared ReLU, no biases. Both are pre-norm.

Shapes: B sequences, T tokens in this call, S tokens attended to (T plus those in the cache), V vocabulary, D d_model,
H query heads, K key/value heads, W head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drumline.config import GPTConfig
from drumline.errors import ConfigError
from drumline.model.loss import IGNORED, capped, linear_cross_entropy
from drumline.model.positions import attention_mask_for, merge_documents, positions


class GPT(nn.Module):
    """A decoder-only transformer."""

    rope: Tensor | None
    vocabulary: int | None = None
    """Ids that exist: the rows after them only round up the vocabulary, and in eval mode have no logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_position_embeddings, config.d_model) if learned else None
        # Not persistent: the table is determined by the config, so it is not part of a checkpoint.
        self.register_buffer("rope", None, persistent=False)
        if not learned:
            from drumline.model.modern import rope_table

            self.rope = rope_table(config)
        self.smear = nn.Parameter(torch.empty(config.d_model)) if config.smear else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.value_tables = nn.ModuleList(
            nn.Embedding(config.vocab_size, config.kv_heads * config.head_width)
            for _ in range(min(config.value_tables, (config.n_layers + 1) // 2))
        )
        self.final_norm = make_norm(config, config.d_model)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialize the weights; biases start at zero."""
        if self.smear is not None:
            # Only some channels of the residual stream should carry the previous token: equal weights would mix both.
            nn.init.normal_(self.smear)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=initial_std(name, self.config))
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits (B, T, V), loss); the loss is None without labels or targets.

        input_ids:      int64 (B, T)
        attention_mask: (B, T), 1 for a token, 0 for padding on either side; no token attends to padding
        labels:         int64 (B, T), the same tokens as input_ids, shifted internally; the loss is their mean in nats
        targets:        int64 (B, T), the *next* token at each position; the loss is their SUM in nats, float32, and the
                        logits are None, so that they never exist all at once
        document_ids:   int (B, T); a token attends only within its document, and positions restart with each document
        cache:          keys and values of previous tokens; those of this call are appended

        Labels and targets of -100 are ignored.
        """
        if labels is not None and targets is not None:
            raise ConfigError("both labels and targets are given", fix="give labels (not shifted) or targets (shifted)")
        hidden = self.hidden(input_ids, documents=merge_documents(attention_mask, document_ids), cache=cache)
        if targets is not None:
            return None, self.summed_loss(hidden, targets)
        logits = self.logits(hidden)
        if labels is None:
            return logits, None
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return logits, loss

    def hidden(self, input_ids: Tensor, *, documents: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """The residual stream after the last block and the final norm: (B, T) -> (B, T, D)."""
        past = cache.length if cache is not None else 0
        length = input_ids.size(1)
        if past + length > self.config.max_position_embeddings:
            most = self.config.max_position_embeddings
            fix = f"use at most {most} tokens, or a model with a larger context"
            raise ConfigError(f"{past + length} tokens exceed the model's {most} positions", fix=fix)
        if cache is not None and documents is not None:
            fix = "drop the cache, or use sequences without padding"
            raise ConfigError("a cache cannot be combined with attention_mask or document_ids", fix=fix)
        x = self.embedded(input_ids, documents, cache)  # (B, T, D)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions(input_ids, documents, past=past))  # (B, T, D) + (T or B T, D)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.bfloat16:
            x = x.bfloat16()  # the residual stream too: its memory traffic is a large part of a step's time
        x = self.dropout(x)
        # Rotary positions are relative, so they need not restart with each document.
        rope = None if self.rope is None else self.rope[:, past : past + length]  # (2, T, W / 2)
        mask = attention_mask_for(documents, length, past=past, device=input_ids.device)
        extra_values = self.extra_values(input_ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, mask, None if cache is None else cache.layers[layer], extra_values.get(layer))
        normed: Tensor = self.final_norm(x)
        return normed

    def embedded(self, input_ids: Tensor, documents: Tensor | None, cache: KVCache | None) -> Tensor:
        """Token embeddings and, with smear, a share of the previous token's: (B, T) -> (B, T, D)."""
        x = self.look_up(input_ids, self.token_embedding.weight)
        if self.smear is None:
            return x
        from drumline.model.modern import one_before

        before = one_before(x, documents, last=None if cache is None else cache.last)
        if cache is not None:
            cache.last = x[:, -1:]
        return x + self.smear.type_as(x) * before

    def look_up(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """Embedding lookup: int64 (B, T), (V, D) -> (B, T, D)."""
        return F.embedding(input_ids, table)

    def extra_values(self, input_ids: Tensor) -> dict[int, Tensor]:
        """Value embeddings by layer: (B, T) -> (B, K, T, W) each."""
        width, tables = self.config.head_width, list(self.value_tables.parameters())
        looked_up = [
            self.look_up(input_ids, table).view(*input_ids.shape, -1, width).transpose(1, 2) for table in tables
        ]
        last_layers = range(self.config.n_layers - len(tables), self.config.n_layers)
        return dict(zip(last_layers, looked_up, strict=True)) | dict(enumerate(looked_up))

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, V)."""
        return capped(F.linear(hidden, self.head_weight), self.config.softcap)

    def summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy without materializing all logits: (B, T, D), int64 (B, T) -> float32 scalar."""
        return linear_cross_entropy(hidden, self.head_weight, targets, softcap=self.config.softcap)

    @property
    def head_weight(self) -> Tensor:
        """The output projection (V, D): the token embedding if it is tied."""
        weight = self.token_embedding.weight if self.head is None else self.head.weight
        return weight if self.training or self.vocabulary is None else weight[: self.vocabulary]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward of each block with torch.compile: they are identical, so one compilation serves them all.

        Hooks on blocks, by which the weights of a sharded model are gathered, stay outside of what is compiled.
        """
        for part in (*self.blocks, self.final_norm):
            part.forward = torch.compile(part.forward, *args, **kwargs)


class TransformerBlock(nn.Module):
    """Attention, then feed-forward, each with pre-norm and a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.d_model)
        self.attention = CausalSelfAttention(config)
        self.feed_forward_norm = make_norm(config, config.d_model)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        extra_values: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D); the other arguments are CausalSelfAttention's."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rope, mask, cache, extra_values))
        output: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return output


class CausalSelfAttention(nn.Module):
    """Causal self-attention: each token attends to itself and to previous tokens."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_heads, self.kv_heads, self.head_width = config.n_heads, config.kv_heads, config.head_width
        self.dropout_probability = config.dropout
        self.row_parts = tuple(heads * self.head_width for heads in (self.n_heads, self.kv_heads, self.kv_heads))
        """Row counts of the queries, keys and values in qkv's weight."""
        self.qkv = nn.Linear(config.d_model, sum(self.row_parts), bias=config.bias)
        self.query_norm = RMSNorm(config.head_width, config) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_width, config) if config.qk_norm else None
        self.out = nn.Linear(self.row_parts[0], config.d_model, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        extra_values: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D) -> (B, T, D).

        rope: (2, T, W / 2), cosines and sines of this call's positions; None: positions are already in x
        mask: bool (T, S) or (B, 1, T, S), True where a query may attend to a key; None: causal
        extra_values: (B, K, T, W), added to the values
        """
        heads = self.qkv(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, H + 2 K, T, W)
        q, k, v = heads.split((self.n_heads, self.kv_heads, self.kv_heads), dim=1)  # (B, H, T, W), 2 x (B, K, T, W)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)  # each head's vector to length sqrt(W)
        if rope is not None:
            from drumline.model.modern import rotate

            q, k = rotate(q, rope), rotate(k, rope)  # (B, H, T, W), (B, K, T, W)
        if extra_values is not None:
            v = v + extra_values.type_as(v)
        if cache is not None:
            k, v = cache.append(k, v)  # 2 x (B, K, S, W)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout_probability if self.training else 0.0,
            is_causal=mask is None and q.size(2) > 1,  # a single query is the newest token: it attends to every key
            enable_gqa=self.kv_heads != self.n_heads,  # query head h uses key/value head h * K // H
        )  # (B, H, T, W)
        merged = y.transpose(1, 2).flatten(2)  # (B, T, H W)
        output: Tensor = self.out(merged)
        return output


class FeedForward(nn.Module):
    """The feed-forward layers: up projection, activation, down projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias) if config.activation == "swiglu" else None
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D), through (B, T, d_ff)."""
        if self.gate is not None:
            inner = F.silu(self.gate(x)) * self.up(x)
        elif self.activation == "relu2":
            inner = F.relu(self.up(x)).square()
        else:
            inner = F.gelu(self.up(x), approximate="tanh" if self.activation == "gelu" else "none")
        output: Tensor = self.down(inner)
        return output


class RMSNorm(nn.RMSNorm):
    """RMSNorm, with an optional learned weight."""

    def __init__(self, width: int, config: GPTConfig) -> None:
        super().__init__(width, eps=config.norm_eps or 1e-6, elementwise_affine=config.norm_weights)

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast, x may be bfloat16 and the weight float32, for which torch has no fused kernel.
        weight = self.weight.type_as(x) if self.elementwise_affine else None
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def initial_std(name: str, config: GPTConfig) -> float:
    """Standard deviation of a module's initial weights.

    gpt2: projections into the residual stream are scaled down with depth. zero: they are zero, as are an untied head
    and the value embeddings, so that the residual stream initially is the token embedding alone.
    """
    writes_residual = name.endswith(("attention.out", "feed_forward.down"))
    if config.init == "gpt2":
        return 0.02 / math.sqrt(2 * config.n_layers) if writes_residual else 0.02
    if writes_residual or name == "head" or name.startswith("value_tables"):
        return 0.0
    if name == "token_embedding" and not config.tie_embeddings:
        return 1.0
    return 0.02 if name.endswith("embedding") else 0.5 / math.sqrt(config.d_model)


def make_norm(config: GPTConfig, width: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(width, config)
    return nn.LayerNorm(width, config.norm_eps or 1e-5, elementwise_affine=config.norm_weights, bias=config.bias)


class KVCache:
    """Keys and values of previous tokens, for text generation: allocated once and filled in place."""

    def __init__(self, model: GPT, *, batch_size: int = 1) -> None:
        config = model.config
        shape = (batch_size, config.kv_heads, config.max_position_embeddings, config.head_width)
        self.layers = [LayerCache(model.token_embedding.weight.new_empty(2, *shape)) for _ in range(config.n_layers)]
        self.last: Tensor | None = None
        """The embedding of the newest token, (B, 1, D), with smear."""

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.layers[0].length

    def clear(self) -> None:
        self.last = None
        for layer in self.layers:
            layer.length = 0


class LayerCache:
    """One layer of a KVCache. room: (2, B, K, max tokens, W)."""

    def __init__(self, room: Tensor) -> None:
        self.keys, self.values = room
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append 2 x (B, K, T, W); returns all cached keys and values, as views of 2 x (B, K, S, W)."""
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]
