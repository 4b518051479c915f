"""Which weights the optimizer kernels support."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from drumline.lazy import room


def adamw_for(model: nn.Module, *, exact: bool) -> type[torch.optim.AdamW]:
    """torch's AdamW, or an equivalent fused kernel if available. exact: see `make_optimizer`"""
    if exact and not all(p.is_cuda for p in model.parameters()):
        from drumline.optim.exact import ExactAdamW

        return ExactAdamW
    # A GPU computes all numbers of a tensor alike.
    if not all(map(suits_kernels, model.parameters())):
        return torch.optim.AdamW
    return room("kernels").OnePassAdamW  # type: ignore[no-any-return]


def suits_kernels(matrix: Tensor) -> bool:
    """Whether Triton kernels are available for it."""
    plain = matrix.dtype == torch.float32 and matrix.is_contiguous()
    return matrix.is_cuda and plain and importlib.util.find_spec("triton") is not None
