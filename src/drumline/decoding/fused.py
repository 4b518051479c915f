"""A step of generation with few Triton kernels: six for each layer of one text, five of many.

Like step.py, up to the rounding of bfloat16. Needs Triton, for which slots.py looks.

Shapes: B texts, D d_model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drumline.decoding.attending import Attention, attend
from drumline.decoding.linear import Activation, Linear, linear
from drumline.decoding.picking import embed, pick
from drumline.decoding.sampling import Kind
from drumline.decoding.state import State
from drumline.model import GPT, RMSNorm, TransformerBlock

_WIDTHS = (32, 64, 128, 256)
_MOST_WIDE = 16384
"""d_model: the embedding of a token is one program."""


def fits(model: GPT) -> bool:
    """Whether the kernels compute this model: half-precision weights, heads as wide as their tiles."""
    config, dtype = model.config, model.token_embedding.weight.dtype
    rows = max(1, config.n_heads // config.kv_heads)
    shape = config.head_width in _WIDTHS and config.d_model % 8 == 0 and config.d_ff % 8 == 0 and rows <= 16
    plain_gate = config.activation != "swiglu" or (config.norm == "rmsnorm" and not config.bias)
    return dtype in (torch.bfloat16, torch.float16) and shape and plain_gate and config.d_model <= _MOST_WIDE


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    attention: Attention
    out: Linear
    up: Linear
    down: Linear


class FusedStep:
    """vocabulary: tokens that may be sampled, the first ones"""

    def __init__(self, model: GPT, state: State, *, vocabulary: int) -> None:
        self._model, self._state, self._vocabulary = model, state, vocabulary
        tables = list(model.value_tables.parameters())
        last = len(model.blocks) - len(tables)
        rope = model.rope if model.rope is None else model.rope.contiguous()
        with torch.no_grad():
            self._layers = []
            for number, block in enumerate(model.blocks):
                assert isinstance(block, TransformerBlock)
                # As GPT.extra_values does it: where the first and the last layers meet, the first ones count.
                table = tables[number] if number < len(tables) else tables[number - last] if number >= last else None
                self._layers.append(_layer(block, state.cache[number], rope, table))
            self._head = _after(model.final_norm, model.head_weight, None, softcap=model.config.softcap)

    def __call__(self, texts: int, positions: int, kind: Kind) -> Tensor:
        model, state = self._model, self._state
        config, weight = model.config, model.token_embedding.weight
        lengths, ids = state.lengths[:texts], state.ids[:texts]

        def rows(width: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.empty(texts, width, dtype=dtype, device=weight.device)

        places = None if model.position_embedding is None else model.position_embedding.weight
        x = embed(state, rows(config.d_model), tokens=weight, smear=model.smear, positions=places)  # (B, D)
        attended, inner = rows(config.n_heads * config.head_width), rows(config.d_ff)
        qkv = rows((config.n_heads + 2 * config.kv_heads) * config.head_width)
        other = rows(config.d_model)
        for layer in self._layers:
            linear(x, layer.qkv, qkv)
            attend(qkv, layer.attention, attended, lengths=lengths, ids=ids, positions=positions)
            x, other = linear(attended, layer.out, other, residual=x), x
            linear(x, layer.up, inner)
            x, other = linear(inner, layer.down, other, residual=x), x
        logits = linear(x, self._head, rows(self._head.weight.size(0), torch.float32))  # (B, V)
        pick(logits, kind, state, vocabulary=self._vocabulary)
        return logits[:, : self._vocabulary]


def _layer(block: TransformerBlock, cache: Tensor, rope: Tensor | None, table: Tensor | None) -> _Layer:
    attention, feed_forward = block.attention, block.feed_forward
    query_norm, key_norm = attention.query_norm, attention.key_norm
    return _Layer(
        _after(block.attention_norm, attention.qkv.weight, attention.qkv.bias),
        Attention(
            cache=cache,
            heads=attention.n_heads,
            norm_eps=None if query_norm is None else query_norm.eps,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            rope=rope,
            table=table,
        ),
        Linear(weight=attention.out.weight, bias=_float(attention.out.bias)),
        _after(
            block.feed_forward_norm,
            feed_forward.up.weight,
            feed_forward.up.bias,
            gate=feed_forward.gate,
            activation=feed_forward.activation,
        ),
        Linear(weight=feed_forward.down.weight, bias=_float(feed_forward.down.bias)),
    )


def _after(
    norm: nn.Module,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gate: nn.Linear | None = None,
    activation: Activation = "none",
    softcap: float = 0.0,
) -> Linear:
    """A layer with the norm before it."""
    assert isinstance(norm, RMSNorm | nn.LayerNorm)
    means: Tensor | None = None
    learned: Tensor | None = norm.weight
    total = _float(bias)
    if isinstance(norm, nn.LayerNorm):
        means = (weight if learned is None else (weight * learned)).float().sum(dim=1)
        if norm.bias is not None:
            shift = weight.float() @ norm.bias.float()
            total = shift if total is None else total + shift
    return Linear(
        weight=weight,
        gate=None if gate is None else gate.weight,
        bias=total,
        norm=learned,
        means=means,
        eps=norm.eps,
        activation=activation,
        softcap=softcap,
    )


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
