"""Activation checkpointing: a block's activations are computed again in backward instead of being kept.

The same numbers, bit by bit: memory is traded for time, and nothing else changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from drumline.lazy import room
from drumline.model.gpt import GPT, TransformerBlock

_aten = torch.ops.aten
KEPT = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""What `selective` keeps: products and attention take most of the time, all else most of the memory."""


def recompute(model: GPT, how: Literal["block", "selective"]) -> None:
    """Keep only the input of each block, or also what took long to compute; the weights keep their names.

    All blocks have the same function, and nothing of it is of one block: compiled, it serves all of them.
    """
    # Without dropout nothing is drawn, and the state of a generator on a GPU need not be read, which would wait.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0.0}
    compiled = {**settings, "context_fn": _selective} if how == "selective" else settings
    # It warns at each start of operations in place, of which a block has none.
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: False)

    def forward(block: TransformerBlock, *arguments: Any) -> Tensor:
        if not (block.training and torch.is_grad_enabled()):  # nothing is kept anyway
            return TransformerBlock.forward(block, *arguments)
        if torch.compiler.is_compiling():
            more = compiled  # the graph has the kernel of attention that was chosen
        else:
            more = {**settings, "context_fn": partial(_contexts, arguments[0].device, how)}
        output: Tensor = checkpoint(TransformerBlock.forward, block, *arguments, **more)
        return output

    for block in model.blocks:
        block.forward = MethodType(forward, block)


Context = AbstractContextManager[Any]


def _contexts(device: torch.device, how: Literal["block", "selective"]) -> tuple[Context, Context]:
    """What a block is computed in: the first time, and again."""
    first, again = _selective() if how == "selective" else (ExitStack(), ExitStack())
    if device.type == "cuda":
        # Backward runs outside of what chose the kernel of attention, and another one keeps other tensors.
        again = _both(again, room("kernels").fastest_attention(device))
    return first, again


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


def _selective() -> tuple[Context, Context]:
    contexts: tuple[Context, Context] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


def _policy(context: Any, operation: Any, *arguments: Any, **more: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
