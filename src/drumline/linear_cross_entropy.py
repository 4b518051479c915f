"""Output matrix and cross entropy in one go, so that the logits of a whole micro-batch never exist at once.

Some rows at a time: their logits, each row's loss, and at once what backward will need, the gradients by the rows and
by the matrix. Backward only scales those. That saves the memory of the logits, and writing and reading them again.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""A target that does not count towards the loss."""

# On a CPU 512 rows of logits stay in the cache from the matrix product to the softmax. A GPU needs more to be busy.
_ROWS_AT_ONCE = {"cpu": 512}
_ROWS_AT_ONCE_ELSEWHERE = 8192


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float = 0.0) -> Tensor:
    """Cross entropy of the targets summed over all positions, in nats: float32 scalar.

    hidden:  (..., D)
    weight:  (V, D), the output matrix
    targets: int64 (...); -100 marks a position that does not count
    softcap: logits x become softcap * tanh(x / softcap); 0 leaves them alone

    Under autocast the products have its format, as F.linear's would.
    """
    rows, wanted = hidden.flatten(0, -2), targets.flatten()  # (N, D), (N)
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    if dtype == torch.float16:  # too small a range for gradients that have not been scaled
        return linear_cross_entropy_reference(rows, weight, wanted, softcap=softcap)
    loss: Tensor = _by_parts(rows.to(dtype), weight.to(dtype), wanted, softcap)
    return loss


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, targets: Tensor, *, softcap: float = 0.0) -> Tensor:
    """The same with all logits at once: (N, D), (V, D), int64 (N) -> float32 scalar."""
    logits = capped(F.linear(hidden, weight).float(), softcap)
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits that approach but never pass +-softcap; 0: as they are."""
    return logits if softcap == 0.0 else softcap * torch.tanh(logits / softcap)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_parts(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, softcap)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float) -> Tensor:
        trains = any(ctx.needs_input_grad)
        by_hidden, by_weight = (torch.empty_like(hidden), torch.zeros_like(weight)) if trains else (hidden, weight)
        losses = []
        at_once = _ROWS_AT_ONCE.get(hidden.device.type, _ROWS_AT_ONCE_ELSEWHERE)
        for start in range(0, len(hidden), at_once):
            part = slice(start, start + at_once)
            logits = hidden[part] @ weight.t()  # (n, V)
            losses.append(_cross_entropy(logits, targets[part], softcap=softcap, gradient=trains).sum())
            if trains:  # the logits are their own gradient now
                torch.mm(logits, weight, out=by_hidden[part])
                by_weight.addmm_(logits.t(), hidden[part])
        ctx.save_for_backward(by_hidden, by_weight)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * gradient.to(by_hidden.dtype), by_weight * gradient.to(by_weight.dtype), None, None


def _cross_entropy(logits: Tensor, targets: Tensor, *, softcap: float, gradient: bool) -> Tensor:
    """Each row's loss, float32 (n); with `gradient`, logits (n, V) become the loss's gradient by them."""
    if logits.is_cuda and logits.dtype == torch.bfloat16 and importlib.util.find_spec("triton"):
        from drumline.fused_cross_entropy import cross_entropy_in_place

        return cross_entropy_in_place(logits, targets, ignored=IGNORED, softcap=softcap, gradient=gradient)
    return cross_entropy_in_place_reference(logits, targets, softcap=softcap, gradient=gradient)


def cross_entropy_in_place_reference(logits: Tensor, targets: Tensor, *, softcap: float, gradient: bool) -> Tensor:
    """As fused_cross_entropy's, in any format and on any device."""
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
