"""Activation checkpointing: a block's activations are computed again in backward instead of being kept.

The same numbers, bit by bit: memory is traded for time, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
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
    """Keep only the input of each block, or also what took long to compute; the weights keep their names."""
    for block in model.blocks:
        assert isinstance(block, TransformerBlock)
        # Without dropout nothing is drawn, and the state of a generator on a GPU need not be read, which would wait.
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0.0}
        settings["context_fn"] = partial(_contexts, block, how)
        block.forward = _Recomputed(block, block.forward, settings)  # type: ignore[method-assign, assignment]


Context = AbstractContextManager[Any]


def _contexts(block: nn.Module, how: Literal["block", "selective"]) -> tuple[Context, Context]:
    """What a block is computed in: the first time, and again."""
    first: Context = ExitStack()
    again: Context = ExitStack()
    if how == "selective":
        first, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    device = next(block.parameters()).device
    if device.type == "cuda":
        # Backward runs outside of what chose the kernel of attention, and another one keeps other tensors.
        again = _both(again, room("kernels").fastest_attention(device))
    return first, again


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


class _Recomputed:
    """The forward of a block. In evaluation and generation, nothing is kept anyway."""

    def __init__(self, block: TransformerBlock, plain: Callable[..., Tensor], settings: dict[str, Any]) -> None:
        self._block, self._plain, self._settings = block, plain, settings

    def __call__(self, *arguments: Any) -> Tensor:
        if not (self._block.training and torch.is_grad_enabled()):
            return self._plain(*arguments)
        output: Tensor = checkpoint(self._plain, *arguments, **self._settings)
        return output


def _policy(context: Any, operation: Any, *arguments: Any, **more: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
