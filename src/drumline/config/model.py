"""The settings of a model. An option of the GPT is declared once, in GPTOptions. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar, get_type_hints

from drumline.config.facts import ANY, check, check_positive, setting

Positions = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_exact", "swiglu", "relu2"]
Init = Literal["gpt2", "zero"]
Recipe = Literal["classic", "modern", "portable"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GPTOptions:
    """The options of a GPT, which GPTConfig and ModelSettings share. The defaults are those of GPT-2 124M."""

    n_layers: int = setting(12, fused=ANY)
    """Number of transformer blocks."""
    n_heads: int = setting(12, fused=ANY)
    """Number of attention heads; must divide d_model, unless head_dim is given."""
    n_kv_heads: int | None = setting(None, fused=ANY)
    """Number of key/value heads (grouped-query attention); must divide n_heads. None: the same as n_heads."""
    d_model: int = setting(768, fused=ANY)
    """Width of the residual stream."""
    d_ff: int = setting(3072, fused=ANY)
    """Hidden width of the feed-forward layers."""
    dropout: float = 0.0
    """Dropout probability."""
    positions: Positions = setting("learned", fused="rope")
    """Position encoding: learned embeddings, or rotary (RoPE)."""
    norm: Norm = setting("layernorm", fused="rmsnorm")
    """LayerNorm or RMSNorm, before attention, feed-forward and output head."""
    activation: Activation = setting("gelu", fused="relu2")
    """Activation of the feed-forward layers; gelu is approximated as in GPT-2; swiglu adds a third matrix, the gate."""
    qk_norm: bool = setting(False, fused=True)
    """Normalize queries and keys (RMSNorm per head) before attention."""
    bias: bool = setting(True, fused=False)
    """Bias terms in linear layers and LayerNorm, as in GPT-2."""
    tie_embeddings: bool = setting(True, fused=ANY)
    """Share the token embedding with the output head."""
    init: Init = setting("gpt2", fused=ANY)
    """Weight initialization: as in GPT-2, or with output projections and an untied head at zero."""
    norm_weights: bool = setting(True, fused=ANY)
    """Learnable weights in the norms."""
    softcap: float = setting(0.0, fused=ANY)
    """Soft cap on the logits: cap * tanh(logits / cap); 0: none."""
    value_tables: int = setting(0, fused=ANY)
    """Number of value embeddings: token embeddings added to the values of as many of the first and last layers."""
    smear: bool = setting(False, fused=ANY)
    """Add the previous token's embedding, scaled by learned weights, to each token's embedding."""
    head_dim: int | None = None
    """Width of a head. None: d_model / n_heads."""
    rope_theta: float | None = setting(None, fused=ANY)
    """Base of the rotary frequencies. None: 10000."""
    norm_eps: float | None = None
    """Added to the variance in the norms. None: 1e-5 for LayerNorm, 1e-6 for RMSNorm."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig(GPTOptions):
    """The architecture of a GPT. The defaults are GPT-2 124M; `positions`, `norm` and `activation` set the family."""

    vocab_size: int = setting(50257, fused=ANY)
    """Rows of the token embedding; at least the vocabulary size of the tokenizer."""
    max_position_embeddings: int = setting(1024, fused=ANY)
    """Maximum sequence length, in tokens."""

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "max_position_embeddings", "n_layers", "n_heads", "n_kv_heads")
        check_positive(self, "d_model", "d_ff", "head_dim")
        odd_width = self.positions == "rope" and self.head_width % 2
        if self.n_heads % self.kv_heads or odd_width or (self.head_dim is None and self.d_model % self.n_heads):
            from drumline.config.ranges import refuse_shape

            refuse_shape(self)
        check(self, dropout=0.0 <= self.dropout < 1.0)
        check(self, softcap=0.0 <= self.softcap < math.inf, value_tables=self.value_tables >= 0)
        above_0 = {"rope_theta": self.rope_theta, "norm_eps": self.norm_eps}
        check(self, **{name: value is None or 0.0 < value < math.inf for name, value in above_0.items()})

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Which model, before any of its options."""

    preset: str = setting("modern-tiny", may_change=True)
    """Model size, with suitable defaults. The presets are listed at the end of `drumline train --help`."""
    recipe: Recipe | None = None
    """Defaults for initialization, model options, optimizer and schedule. Default: the preset's."""
    init_from: str | None = setting(None, per_host=True)
    """Start from a model: a Hugging Face folder or name, or nanoGPT's ckpt.pt, which also sets the model options."""
    model: str = "gpt"
    """gpt, or package.module:name of a function that takes a GPTConfig and returns an nn.Module."""
    model_options: tuple[str, ...] = ()
    """key=value, passed as a keyword argument to the function of --model. May be repeated."""
    context: int | None = None
    """Sequence length in tokens. Default: the preset's."""

    def __post_init__(self) -> None:
        if self.model_options:
            from drumline.config.options import checked_options

            object.__setattr__(self, "model_options", checked_options(self.model, self.model_options))


def _options_left_open(kind: type[T]) -> type[T]:
    """Give the options that a class inherits from GPTOptions the default None, for the preset's value."""
    hints = get_type_hints(GPTOptions)
    kind.__annotations__ = {name: hint | None for name, hint in hints.items()}
    for option in fields(GPTOptions):
        setattr(kind, option.name, field(default=None, metadata=option.metadata))
    return kind


@dataclass(frozen=True, kw_only=True)
@_options_left_open
class ModelSettings(GPTOptions, ModelChoice):
    """The model to train: a preset, and what differs from it. Options are None until with_preset resolves them."""
