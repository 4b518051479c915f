"""FusedGPT: a GPT that trains with Triton kernels where they apply, and is a plain GPT everywhere else.

They apply to a modern model (rotary positions, RMSNorm, QK norm, squared ReLU, no biases) without dropout and without
grouped-query attention, in bfloat16 on a Hopper GPU. Weights remain float32 parameters with the same names as in a
GPT, so optimizer, ranks and checkpoints see no difference; each forward casts them once. On such a GPU, drumline trains
it by default; with `--fp8`, feed-forward layers and output head are float8 (fp8.py).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from drumline.config import ANY, GPTConfig, TrainConfig, gpt_config
from drumline.errors import ConfigError
from drumline.model import GPT, KVCache, RMSNorm, TransformerBlock, linear_cross_entropy
from drumline.parallel import is_hopper

FUSED, _FLOAT8 = "drumline.kernels.gpt:FusedGPT", "drumline.kernels.gpt:Float8GPT"
_TOKENS_MULTIPLE = 128
_ROWS_AT_ONCE = 8192
"""Rows of logits at once: fewer activations are kept for backward than in a plain GPT, so there is space for more."""


# The first that can do what is asked: cuDNN's is the fastest, and stands back where bits must repeat.
_ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """Inside, attention is computed by the fastest kernel that can; elsewhere than on Hopper torch itself knows it."""
    return sdpa_kernel(_ATTENTION, set_priority=True) if is_hopper(device) else nullcontext()


class FusedGPT(GPT):
    """The same function, names and weights as GPT."""

    fp8 = False
    """Whether training computes feed-forward and head in float8, where the kernels apply; evaluation never does."""

    def hidden(self, input_ids: Tensor, *, documents: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        fits_in = input_ids.size(1) <= self.config.max_position_embeddings and input_ids.numel() % _TOKENS_MULTIPLE == 0
        dtype = torch.bfloat16 if _bf16(input_ids.device) else torch.float32
        if cache is None and fits_in and self.is_fused(input_ids.device, dtype):
            return _hidden(self, input_ids, documents, fp8=self.fp8 and self.training)
        return super().hidden(input_ids, documents=documents, cache=cache)

    def look_up(self, input_ids: Tensor, table: Tensor) -> Tensor:
        device = input_ids.device
        if _bf16(device) and (has_kernels(device) or self.is_fused(device, torch.bfloat16)):
            from drumline.kernels.embedding import embedding  # needs Triton

            return embedding(input_ids, table)
        return super().look_up(input_ids, table)

    def summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not self.is_fused(hidden.device, hidden.dtype):
            return super().summed_loss(hidden, targets)
        fits_in = targets.numel() % _TOKENS_MULTIPLE == 0 and self.config.vocab_size % 16 == 0
        if self.fp8 and self.training and fits_in:
            from drumline.kernels.fp8_loss import float8_linear_cross_entropy as loss
        else:
            loss = linear_cross_entropy
        return loss(hidden, self.head_weight, targets, softcap=self.config.softcap, rows_at_once=_ROWS_AT_ONCE)

    def is_fused(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether training on this device with this autocast dtype uses the kernels."""
        return dtype == torch.bfloat16 and has_kernels(device) and fits(self.config)


class Float8GPT(FusedGPT):
    """The model for --fp8."""

    fp8 = True


def _bf16(device: torch.device) -> bool:
    """Whether autocast to bfloat16 is active on this device."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.bfloat16


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels support a device and can be compiled."""
    return is_hopper(device) and importlib.util.find_spec("triton") is not None


def fits(config: GPTConfig) -> bool:
    """Whether the kernels compute what this config describes."""
    return not misfits(config)


@functools.cache
def misfits(config: GPTConfig) -> tuple[str, ...]:
    """What the kernels do not support in a config, including any option that they do not know."""
    problems = []
    for option in fields(GPTConfig):
        value, fused = getattr(config, option.name), option.metadata.get("fused", option.default)
        if fused is not ANY and value != fused:
            problems.append(f"{option.name} {value} instead of {fused}")
    width = config.head_width
    if config.kv_heads != config.n_heads:
        problems.append(f"{config.kv_heads} key/value heads for {config.n_heads} heads")
    if not 16 <= width <= 256 or width & (width - 1):
        problems.append(f"heads {width} wide (d_model / n_heads), not 16, 32, 64, 128 or 256")
    for name, value, multiple in (("d_model", config.d_model, 64), ("d_ff", config.d_ff, 256)):
        if value % multiple:
            problems.append(f"{name} {value}, not a multiple of {multiple}")
    return tuple(problems)


def check_fp8(config: TrainConfig, device: torch.device) -> None:
    """Refuse --fp8 where a run could not use it. config: resolved"""
    if not config.run.fp8:
        return
    assert config.model.context is not None
    unfit = misfits(gpt_config(config.model, vocab_size=1))
    if not is_hopper(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"the {device.type}"
        problem, fix = f"needs a Hopper GPU (H100, H200), but this run uses {name}", "train on one"
    elif config.model.model not in ("gpt", FUSED):
        problem, fix = f"is for drumline's own GPT, not for --model {config.model.model}", "use --model gpt"
    elif unfit:
        problem = f"does not support this model: {'; '.join(unfit)}"
        fix = "use the model options of --preset modern"
    elif config.model.context % _TOKENS_MULTIPLE:
        problem = f"needs a context that is a multiple of {_TOKENS_MULTIPLE} tokens, not {config.model.context}"
        fix = f"choose another --context, as {-(-config.model.context // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE}"
    elif config.ranks.bitwise:
        problem, fix = "is not bitwise reproducible, as --bitwise requires", "drop --bitwise"
    elif config.ranks.shard != "none":
        problem, fix = "takes all weights at once, which a sharded model does not have", "drop --shard"
    elif _recomputes(config):
        problem, fix = "does not recompute activations", "drop --activation_checkpointing"
    elif config.run.dtype not in ("auto", "bfloat16"):
        problem, fix = f"uses bfloat16 for everything else, not {config.run.dtype}", "use --dtype bfloat16"
    elif not has_kernels(device):
        problem, fix = "needs Triton, which is not installed", "pip install triton"
    else:
        return
    raise ConfigError(f"--fp8 {problem}", fix=f"{fix}, or drop --fp8")


def with_kernels(config: TrainConfig, device: torch.device) -> TrainConfig:
    """The config of the model to build: a Float8GPT with --fp8, a FusedGPT where the kernels apply.

    --bitwise only uses operations that are known to be reproducible, activations that are computed again are those of
    a plain GPT, and the kernels take the weights of all layers at once, which --shard gathers one after the other.
    """
    chosen = config.model.model
    if config.run.fp8:
        chosen = _FLOAT8
    elif chosen == "gpt" and has_kernels(device) and not config.ranks.bitwise and not _recomputes(config):
        whole = config.ranks.shard == "none" or not fits(gpt_config(config.model, vocab_size=1))
        chosen = FUSED if whole else chosen  # else only its lookup is used, which takes one weight at a time
    return replace(config, model=replace(config.model, model=chosen))


def _recomputes(config: TrainConfig) -> bool:
    """The kernels keep few activations, and do not compute them again."""
    return config.run.activation_checkpointing != "none"


def _hidden(model: FusedGPT, input_ids: Tensor, documents: Tensor | None, *, fp8: bool) -> Tensor:
    """Like GPT.hidden: int64 (B, T) -> bf16 (B, T, D).

    The output of each part is added to the residual stream by the norm that follows, which has to read it anyway.
    Learned weights of a norm are multiplied into the matrix that follows it.
    """
    from drumline.kernels.attention import document_attention, document_spans  # needs Triton, like the next
    from drumline.kernels.embedding import smeared
    from drumline.kernels.ops import add_rms_norm, qkv
    from drumline.kernels.products import linear

    assert model.rope is not None
    rope = model.rope[:, : input_ids.size(1)]
    extra_values = model.extra_values(input_ids)
    x = model.look_up(input_ids, model.token_embedding.weight)  # (B, T, D)
    x = (x if model.smear is None else smeared(x, model.smear, documents)).flatten(0, 1)  # (N, D)
    spans = None if documents is None else document_spans(documents)
    feed_forwards = _feed_forwards(model, fp8=fp8)
    delta: Tensor | None = None
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        attention = block.attention
        x, normed = add_rms_norm(x, delta)
        q, k, v = qkv(
            normed,
            _after(block.attention_norm, attention.qkv),
            _weight(attention.query_norm),
            _weight(attention.key_norm),
            extra_values.get(layer),
            rope,
            heads=attention.n_heads,
        )  # 3 x (B, H, T, W)
        if spans is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)  # (B, T, H, W)
        else:
            y = document_attention(q, k, v, spans)
        attended = linear(y.reshape(x.shape), attention.out.weight)  # (N, D)
        x, normed = add_rms_norm(x, attended)
        delta = feed_forwards[layer](normed)
    normed, weight = add_rms_norm(x, delta)[1], _weight(model.final_norm)
    return (normed if weight is None else normed * weight.type_as(normed)).view(*input_ids.shape, -1)


def _feed_forwards(model: GPT, *, fp8: bool) -> list[Callable[[Tensor], Tensor]]:
    """Each layer's feed-forward part: bf16 (N, D) -> bf16 (N, D)."""
    from drumline.kernels import fp8 as float8
    from drumline.kernels import products

    blocks = [block for block in model.blocks if isinstance(block, TransformerBlock)]
    parts = [(block.feed_forward_norm, block.feed_forward) for block in blocks]
    weights = [(_after(norm, part.up), part.down.weight) for norm, part in parts]
    if fp8:
        copies = float8.float8_weights([weight for pair in weights for weight in pair])
        return [
            functools.partial(float8.relu2_mlp, up=up, down=down, up8=up8, down8=down8)
            for (up, down), up8, down8 in zip(weights, copies[::2], copies[1::2], strict=True)
        ]
    return [functools.partial(products.relu2_mlp, up=up, down=down) for up, down in weights]


def _after(norm: nn.Module, layer: nn.Linear) -> Tensor:
    """A layer's matrix, with the learned weights of the preceding norm multiplied into its columns."""
    from drumline.kernels.ops import times_columns

    weight = _weight(norm)
    return layer.weight if weight is None else times_columns(layer.weight, weight)


def _weight(norm: nn.Module | None) -> Tensor | None:
    """The learned weights of a norm, if it has any."""
    assert isinstance(norm, RMSNorm)
    return norm.weight if norm.elementwise_affine else None
