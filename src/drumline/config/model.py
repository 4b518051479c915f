"""The settings of a model. An option of the GPT is declared once, in GPTOptions. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar, get_type_hints

from drumline.config.facts import ANY, check, check_positive, setting
from drumline.errors import ConfigError

Positions = Literal["learned", "rope"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "swiglu", "relu2"]
Init = Literal["gpt2", "zero"]
Recipe = Literal["classic", "modern"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class GPTOptions:
    """The options of a GPT, which GPTConfig and ModelSettings share. The defaults are those of GPT-2 124M."""

    n_layers: int = setting(12, fused=ANY)
    """Number of transformer blocks."""
    n_heads: int = setting(12, fused=ANY)
    """Number of attention heads; must divide d_model."""
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
    """Activation of the feed-forward layers; swiglu adds a third matrix, the gate."""
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


@dataclass(frozen=True, kw_only=True)
class GPTConfig(GPTOptions):
    """The architecture of a GPT. The defaults are GPT-2 124M; `positions`, `norm` and `activation` set the family."""

    vocab_size: int = setting(50257, fused=ANY)
    """Rows of the token embedding; at least the vocabulary size of the tokenizer."""
    max_position_embeddings: int = setting(1024, fused=ANY)
    """Maximum sequence length, in tokens."""
    rope_theta: float = setting(10_000.0, fused=ANY)
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        check_positive(self, "vocab_size", "max_position_embeddings", "n_layers", "n_heads", "n_kv_heads")
        check_positive(self, "d_model", "d_ff")
        if self.d_model % self.n_heads:
            raise ConfigError(
                f"d_model {self.d_model} cannot be divided over {self.n_heads} heads",
                fix="choose --d_model as a multiple of --n_heads",
            )
        if self.n_heads % self.kv_heads:
            raise ConfigError(
                f"{self.n_heads} heads cannot share {self.kv_heads} key/value heads evenly",
                fix="choose --n_kv_heads as a divisor of --n_heads",
            )
        if self.positions == "rope" and self.head_width % 2:
            raise ConfigError(
                f"rotary positions need an even head width, not {self.head_width} (d_model / n_heads)",
                fix="change --d_model or --n_heads, or use --positions learned",
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout {self.dropout} is not a probability below 1", fix="use --dropout 0.0 to 0.9")
        check(self, softcap=0.0 <= self.softcap < math.inf, value_tables=self.value_tables >= 0)

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """Which model, before any of its options."""

    preset: str = setting("modern-tiny", may_change=True)
    """Model size, with suitable defaults. The presets are listed at the end of `drumline train --help`."""
    recipe: Recipe | None = None
    """Defaults for initialization, model options, optimizer and schedule. Default: the preset's."""
    model: str = "gpt"
    """gpt, or package.module:name of a function that takes a GPTConfig and returns an nn.Module."""
    model_options: tuple[str, ...] = ()
    """key=value, passed as a keyword argument to the function of --model. May be repeated."""
    context: int | None = None
    """Sequence length in tokens. Default: the preset's."""

    def __post_init__(self) -> None:
        if not self.model_options:
            return
        from drumline.config.options import option_words, plugin_options

        if self.model == "gpt":
            raise ConfigError(
                f"model_options {' '.join(self.model_options)} are for a custom model, not for --model gpt",
                fix="set --model my_module:my_model, or use the options of the GPT, such as --n_layers",
            )
        # Normalize values, so that configs can be compared.
        object.__setattr__(self, "model_options", tuple(option_words(plugin_options(self.model_options))))


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
