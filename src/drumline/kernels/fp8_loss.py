"""Output projection and cross entropy in float8, a chunk of rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drumline.kernels import fp8 as f8
from drumline.model import IGNORED, WATCHERS, by_parts, cross_entropy_reference, rescaled


def float8_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float, rows_at_once: int
) -> Tensor:
    """Like model.linear_cross_entropy, with float8 matmuls.

    hidden: (..., D), the output of a norm; all sizes are multiples of 16
    """
    rows, wanted = hidden.flatten(0, -2), targets.flatten()  # (N, D), (N)
    parts = [slice(start, start + rows_at_once) for start in range(0, len(rows), rows_at_once)]
    loss: Tensor = by_parts(_Float8LinearCrossEntropy, rows, weight, wanted, softcap, parts)
    return loss


class _Float8LinearCrossEntropy(torch.autograd.Function):
    """All three matmuls in float8; the logits in between are bf16, and their gradient is e5m2."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, parts: list[slice]
    ) -> Tensor:
        by_hidden, by_weight, losses = torch.empty_like(hidden), None, []
        (matrix,) = f8.float8_weights([weight])
        inverse = f8.scalar(1.0 / f8.LOGIT_TOP, hidden.device)
        for part in parts:
            rows = f8.float8_normed(hidden[part])
            logits = f8.product(rows.straight, matrix.straight, rows.inverse, matrix.inverse, fast=True)  # (n, V)
            loss, gradient = _to_float8(logits, targets[part], softcap=softcap, scale=f8.LOGIT_TOP)
            del logits  # frees memory for the transposed gradient
            losses.append(loss)
            by_hidden[part] = f8.product(gradient, matrix.turned, inverse, matrix.inverse, fast=False)
            share = f8.product(f8.transposed(gradient), rows.turned, inverse, rows.inverse, fast=False)
            by_weight = share if by_weight is None else by_weight.add_(share)
        ctx.save_for_backward(by_hidden, by_weight)
        for watcher in WATCHERS:
            watcher(losses)
        return torch.stack([part.sum() for part in losses]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return rescaled(ctx.saved_tensors, gradient)


def _to_float8(logits: Tensor, targets: Tensor, *, softcap: float, scale: float) -> tuple[Tensor, Tensor]:
    """Each row's loss, float32 (n), and `scale` times the gradient of the logits, e5m2 (n, V)."""
    if logits.is_cuda:
        from drumline.kernels.cross_entropy import cross_entropy_to_float8  # needs Triton

        return cross_entropy_to_float8(logits, targets, ignored=IGNORED, softcap=softcap, scale=scale)
    return cross_entropy_to_float8_reference(logits, targets, softcap=softcap, scale=scale)


def cross_entropy_to_float8_reference(
    logits: Tensor, targets: Tensor, *, softcap: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Like cross_entropy_to_float8."""
    values = logits.float()
    losses = cross_entropy_reference(values, targets, softcap=softcap, gradient=True)
    return losses, f8.rounded(values * scale, torch.float8_e5m2)
