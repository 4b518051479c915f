"""How much memory a step takes, from the config alone.

A step needs the most at the end of forward, when all activations are there, or at the end of backward, when all
gradients are. The factors follow from what each operation keeps for backward; those that say so are measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drumline.config import ModelSettings, TrainConfig, gpt_config
from drumline.kernels import FUSED, fits, has_kernels
from drumline.optim import state_size
from drumline.sharding import check_shard

_COMPILED = {"layernorm": 0.87, "rmsnorm": 0.75}
"""Share of a block's activations that torch.compile keeps, as measured on a GPU."""
_SELECTIVE = 0.6
"""The same of selective activation checkpointing, as measured; of a whole block, its input is kept."""
_BY_KERNELS = 12.1
"""Numbers per token, layer and unit of width that the Triton kernels keep, as measured; those of a last block are 5."""
_ROWS_AT_ONCE = {"cpu": 512, "cuda": 4096, "mps": 4096, "hopper": 8192}
"""Rows of logits that the loss computes at one time, of which two parts exist while one replaces the other."""


@dataclass(frozen=True)
class Memory:
    """An estimate of the memory of a training step on one rank."""

    parameters: int
    state_bytes: int
    """Weights and optimizer state, in float32; of a sharded model, this rank's part, and what it gathers."""
    step_bytes: int
    """Gradients and activations: the most that exists of them at one time."""
    checkpoint_bytes: int
    """Weights and optimizer state of all ranks."""
    host_bytes: int = 0
    """Of host memory, beside a GPU: weights, gradients and optimizer state of this rank that are offloaded."""

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + self.step_bytes


def estimate(
    config: TrainConfig,
    *,
    tokens: int,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int = 1,
    rounds: int = 1,
    kernels: bool | None = None,
) -> Memory:
    """For a resolved config, and steps of `rounds` micro-batches of `tokens` tokens on each of so many ranks.

    kernels: whether the device has those for Hopper GPUs; None: look
    """
    hopper = has_kernels(device) if kernels is None else kernels
    state, ways = state_size(config, vocab_size=vocab_size), config.ranks
    activations = _activation_bytes(
        config, tokens=tokens, vocab_size=vocab_size, device=device, dtype=dtype, hopper=hopper
    )
    gradients, kept, shared = 4 * state.parameters, state.checkpoint_bytes, ways.shard != "none"
    on_host = 0
    if shared:
        sharing = check_shard(ways.shard, ranks, elastic=True)  # others are refused elsewhere
        gradients, kept = -(-gradients // sharing), -(-kept // sharing)
        if config.run.offload == "optimizer" and device.type == "cuda":  # elsewhere, the host's memory is the device's
            gradients, kept, on_host = 0, 0, gradients + kept
        kept += _gathered_bytes(config, state.parameters, vocab_size=vocab_size, dtype=dtype)
    if dtype != torch.float32 and (ways.bitwise or not shared):  # autocast keeps the matrices that it has rounded
        activations += dtype.itemsize * (state.parameters - sum(_looked_up(config.model, vocab_size=vocab_size)))
    if ways.bitwise:  # one copy in a row, and the sums of the tree
        gradients *= 1 + rounds.bit_length()
    stay = rounds > 1 or (ranks > 1 and not shared)  # torch's DDP keeps them from step to step
    step = gradients + activations if stay else max(gradients, activations)
    return Memory(state.parameters, kept, step, state.checkpoint_bytes, on_host)


def _activation_bytes(
    config: TrainConfig, *, tokens: int, vocab_size: int, device: torch.device, dtype: torch.dtype, hopper: bool
) -> int:
    """What is kept for backward, with what one block's backward adds, and the logits that exist at one time."""
    model, how = config.model, config.run.activation_checkpointing
    assert model.n_layers and model.d_model
    takes_kernels = dtype == torch.bfloat16 and hopper and fits(gpt_config(model, vocab_size=vocab_size))
    if takes_kernels and _uses_kernels(config):
        blocks = (_BY_KERNELS * model.n_layers + 5) * model.d_model * dtype.itemsize
    else:
        block = _block_bytes(model, dtype, device) * (_COMPILED[model.norm or "layernorm"] if config.run.compile else 1)
        stream = model.d_model * dtype.itemsize
        layers = {"none": block, "block": stream, "selective": _SELECTIVE * block}[how]
        blocks = model.n_layers * layers + (block if how == "none" else 2 * block)
    rows = min(tokens, _ROWS_AT_ONCE["hopper" if hopper else device.type])
    in_place = dtype == torch.bfloat16 and device.type == "cuda"  # the gradient takes the place of the logits
    logit_bytes = rows * min(2, -(-tokens // rows)) * vocab_size * dtype.itemsize
    if not in_place:
        logit_bytes = rows * vocab_size * (dtype.itemsize + 8)
    if dtype == torch.float16:  # all logits at once
        logit_bytes = tokens * vocab_size * (dtype.itemsize + 8)
    own_gradients = (vocab_size + tokens) * model.d_model * dtype.itemsize  # the loss computes them in forward
    return round(tokens * blocks) + logit_bytes + own_gradients


def _uses_kernels(config: TrainConfig) -> bool:
    """The kernels for whole models, where they support the model."""
    plain = config.ranks.shard == "none" and not config.ranks.bitwise
    return plain and config.run.activation_checkpointing == "none" and config.model.model in ("gpt", FUSED)


def _block_bytes(model: ModelSettings, dtype: torch.dtype, device: torch.device) -> int:
    """What backward of a block needs, per token."""
    options = gpt_config(model, vocab_size=1)
    width, queries, keys = options.d_model, options.n_heads * options.head_width, options.kv_heads * options.head_width
    numbers = 2 * width + (queries + 2 * keys) + queries  # the projections' inputs; attention's inputs and its output
    if options.positions == "rope":
        numbers += queries + keys  # rotated
    numbers += (4 if options.activation == "swiglu" else 2) * options.d_ff
    if options.norm == "layernorm":
        exact = 4 if device.type == "cuda" else dtype.itemsize  # autocast computes it in float32 on a GPU
        return numbers * dtype.itemsize + 2 * width * exact
    normed = 2 * width + (queries + keys if options.qk_norm else 0)
    if dtype != torch.float32:  # its input in float32, and where it is not one kernel its output
        return numbers * dtype.itemsize + (4 if device.type == "cuda" else 8) * normed
    return (numbers + 2 * width + (normed if options.norm_weights else 0)) * dtype.itemsize


def _looked_up(model: ModelSettings, *, vocab_size: int) -> tuple[int, int]:
    """Weights that are looked up and never multiplied with: of value embeddings, and of an untied token embedding."""
    options = gpt_config(model, vocab_size=vocab_size)
    values = vocab_size * options.value_tables * options.kv_heads * options.head_width
    return values, 0 if options.tie_embeddings else vocab_size * options.d_model


def _gathered_bytes(config: TrainConfig, parameters: int, *, vocab_size: int, dtype: torch.dtype) -> int:
    """Weights that a sharded rank has whole at one time, with their gradients: two blocks, embeddings and head."""
    model = config.model
    assert model.n_layers and model.d_model
    values, embedding = _looked_up(model, vocab_size=vocab_size)
    head = vocab_size * model.d_model
    block = (parameters - values - embedding - head) // model.n_layers
    in_blocks = 2 * block * (2 * dtype.itemsize + 4)  # gathered, its gradient, and that in float32 to be summed
    exact = values + embedding + (0 if embedding else head)  # what is looked up is float32, a tied head too
    return in_blocks + 8 * exact + (2 * dtype.itemsize * head if embedding else 0)
