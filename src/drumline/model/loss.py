"""Output projection fused with cross entropy, so that the logits of a whole micro-batch never exist at once.

Works on a chunk of rows at a time: logits, loss, and immediately the gradients of the rows and the weight, which
backward only scales. That saves the memory of the logits, and writing and reading them again.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.lazy import room

IGNORED = -100
"""A target that is ignored by the loss."""
WATCHERS: list[Any] = []
"""Functions that get the losses of all rows, a list of float32 (n,), before they are summed."""

# On a CPU, 512 rows of logits stay in the cache from the matmul to the softmax. A GPU needs more rows to be busy:
# twice as many are 1 % faster, and need 0.8 GiB more for a vocabulary of 50,304.
_ROWS_AT_ONCE = {"cpu": 512}
_ROWS_AT_ONCE_ELSEWHERE = 4096


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    softcap: float = 0.0,
    rows_at_once: int | None = None,
) -> Tensor:
    """Cross entropy summed over all positions, in nats: float32 scalar.

    hidden:  (..., D)
    weight:  (V, D), the output projection
    targets: int64 (...); -100: ignored
    softcap: logits x become softcap * tanh(x / softcap); 0: off
    rows_at_once: rows of logits per chunk; by default what suits the device

    Under autocast, matmuls use its dtype, as in F.linear.
    """
    rows, wanted = hidden.flatten(0, -2), targets.flatten()  # (N, D), (N)
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    if dtype == torch.float16:  # its range is too small for unscaled gradients
        from drumline.model.whole_logits import linear_cross_entropy_reference

        return linear_cross_entropy_reference(rows, weight, wanted, softcap=softcap)
    if rows_at_once is None:
        rows_at_once = _ROWS_AT_ONCE.get(device, _ROWS_AT_ONCE_ELSEWHERE)
    parts = [slice(start, start + rows_at_once) for start in range(0, len(rows), rows_at_once)]
    loss: Tensor = by_parts(_LinearCrossEntropy, rows.to(dtype), weight, wanted, softcap, parts)
    return loss


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits soft-capped to +-softcap; 0: unchanged."""
    return logits if softcap == 0.0 else softcap * torch.tanh(logits / softcap)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def by_parts(
    way: type[torch.autograd.Function],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float,
    parts: list[slice],
) -> Tensor:
    loss: Tensor = way.apply(hidden, weight, targets, softcap, parts)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float, parts: list[slice]
    ) -> Tensor:
        trains = any(ctx.needs_input_grad)
        matrix = weight.to(hidden.dtype)
        by_hidden, by_matrix = (torch.empty_like(hidden), torch.zeros_like(matrix)) if trains else (hidden, matrix)
        losses = []
        for part in parts:
            logits = hidden[part] @ matrix.t()  # (n, V)
            losses.append(_cross_entropy(logits, targets[part], softcap=softcap, gradient=trains))
            if trains:  # logits now contain their own gradient
                torch.mm(logits, matrix, out=by_hidden[part])
                by_matrix.addmm_(logits.t(), hidden[part])
        ctx.save_for_backward(by_hidden, by_matrix)
        for watcher in WATCHERS:
            watcher(losses)
        return torch.stack([part.sum() for part in losses]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return rescaled(ctx.saved_tensors, gradient)


def rescaled(kept: tuple[Tensor, Tensor], gradient: Tensor) -> tuple[Tensor | None, ...]:
    by_hidden, by_weight = kept
    # As (1, 1), the scale makes the product float32, the weight's dtype, in the same pass.
    return by_hidden * gradient.to(by_hidden.dtype), by_weight * gradient.reshape(1, 1), None, None, None


def _cross_entropy(logits: Tensor, targets: Tensor, *, softcap: float, gradient: bool) -> Tensor:
    """Each row's loss, float32 (n); with `gradient`, the logits (n, V) are overwritten with their gradient."""
    if logits.is_cuda and logits.dtype == torch.bfloat16 and importlib.util.find_spec("triton"):
        return room("kernels").cross_entropy_in_place(  # type: ignore[no-any-return]
            logits, targets, ignored=IGNORED, softcap=softcap, gradient=gradient
        )
    return cross_entropy_reference(logits, targets, softcap=softcap, gradient=gradient)


def cross_entropy_reference(logits: Tensor, targets: Tensor, *, softcap: float, gradient: bool) -> Tensor:
    """Like kernels.cross_entropy_in_place, for any dtype and device."""
    values = capped(logits.float(), softcap)
    log_chances = torch.log_softmax(values, dim=-1)
    losses = F.nll_loss(log_chances, targets, reduction="none", ignore_index=IGNORED)
    if gradient:
        counts = (targets != IGNORED).unsqueeze(1)  # (n, 1)
        by_values = log_chances.exp_().scatter_add_(
            1, targets.clamp(min=0).unsqueeze(1), torch.full_like(losses, -1.0).unsqueeze(1)
        )
        by_values *= counts
        if softcap:
            by_values *= 1.0 - (values / softcap).square()
        logits.copy_(by_values)
    return losses
