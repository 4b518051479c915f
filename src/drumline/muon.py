"""Muon: the update of a matrix is its momentum with all singular values brought near 1; other weights are AdamW's.

Matrices of one shape are brought there together, as one batch of matrix products. Every rank computes the same update
from the same gradient, so nothing is exchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

FIRST_MOMENTUM, MOMENTUM_STEPS = 0.85, 100
"""Momentum grows from this, over so many steps: early gradients are soon out of date."""

# x <- a x + b (x x^T) x + c (x x^T)^2 x, with triples that differ from one iteration to the next: the first four of
# "Polar Express" (Amsel et al., 2025). They leave singular values between about 0.4 and 1.6, which is near enough.
_ITERATIONS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
)


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`, and the optimizer `others` for the rest, as one: its groups are theirs, Muon's the first."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: torch.optim.Optimizer,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._others = others
        self.param_groups += others.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update of all weights that have a gradient; a closure is not called."""
        self._step_matrices(self.param_groups[0])
        # One state and one list of groups, whoever replaced them since.
        self._others.state, self._others.param_groups = self.state, self.param_groups[1:]
        self._others.step()

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in group["params"]:
            if matrix.grad is not None:
                by_shape[matrix.shape].append(matrix)
        for shape, matrices in by_shape.items():
            step = self._count(matrices)
            mu = momentum_at(step, group["momentum"])
            momenta: list[Tensor] = [self.state[matrix]["momentum"] for matrix in matrices]
            gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
            torch._foreach_lerp_(momenta, gradients, 1.0 - mu)
            updates = orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, mu)))  # Nesterov's look ahead
            # Each output changes by about as much, however many inputs it has.
            rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
            if group["weight_decay"]:
                torch._foreach_mul_(matrices, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(matrices, list(updates.to(matrices[0].dtype).unbind()), alpha=-rate)

    def _count(self, matrices: Sequence[Tensor]) -> int:
        """How many updates these matrices have had; counts this one."""
        for matrix in matrices:
            state = self.state[matrix]
            if not state:
                state["step"], state["momentum"] = 0, torch.zeros_like(matrix)
            state["step"] += 1
        return int(self.state[matrices[0]]["step"]) - 1


def momentum_at(step: int, momentum: float) -> float:
    """`step` counts from 0."""
    return FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * min(1.0, step / MOMENTUM_STEPS)


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and singular values near 1: (N, rows, columns) -> the same.

    A matrix of zeros stays one. On CUDA the products are bfloat16, whose errors are smaller than what is left anyway.
    """
    norms = matrices.square().sum((1, 2), keepdim=True).sqrt()  # (N, 1, 1), at least the largest singular value
    x = matrices / (norms * 1.02 + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    tall = x.size(1) > x.size(2)
    for a, b, c in _ITERATIONS:
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)  # (N, m, m), m the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        x = torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x)
    return x
