"""Muon: matrix updates are momentum with all singular values moved close to 1; other weights use AdamW.

Each row is then divided by the RMS of its recent updates, as Adam does per element ("NorMuon", Li et al., 2025), so
that all outputs of a layer learn at a similar rate.

Matrices of the same shape are orthogonalized together, as one batch of matmuls. Every rank computes the same update
from the same gradient, so there is no communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drumline.lazy import room
from drumline.optim.suited import suits_kernels

FIRST_MOMENTUM, MOMENTUM_STEPS = 0.85, 100
"""Initial momentum, and the number of steps over which it is warmed up: early gradients are soon outdated."""

_VARIANCE_BETA = 0.95

# x <- a x + b (x x^T) x + c (x x^T)^2 x, with different coefficients in each iteration: the first four of "Polar
# Express" (Amsel et al., 2025). They leave singular values between about 0.4 and 1.6, which is close enough.
_ITERATIONS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
)


class Muon(torch.optim.Optimizer):
    """Muon for `matrices` and the optimizer `others` for the rest, combined; Muon's parameter groups come first."""

    found_inf: Tensor
    """Device tensors of torch's GradScaler protocol, for optimizers that need no synchronization with the host:
    found_inf above 0 skips the update, grad_scale divides the gradients."""
    grad_scale: Tensor | None

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: torch.optim.Optimizer,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        row_parts: Mapping[Tensor, Sequence[int]] | None = None,
    ) -> None:
        """row_parts: row counts of matrices that are stacked in one parameter; each is updated separately"""
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._others, self._row_parts = others, dict(row_parts or {})
        scalable = bool(getattr(others, "_step_supports_amp_scaling", False)) or not others.param_groups[0]["params"]
        self._step_supports_amp_scaling = scalable and all(map(suits_kernels, self.param_groups[0]["params"]))
        self.param_groups += others.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient; a closure is not called."""
        self._step_matrices(self.param_groups[0])
        others: Any = self._others
        # One state and one list of groups, even if they were replaced since.
        others.state, others.param_groups = self.state, self.param_groups[1:]
        scaling = {name: vars(self)[name] for name in ("found_inf", "grad_scale") if name in vars(self)}
        vars(others).update(scaling)
        try:
            others.step()
        finally:
            for name in scaling:
                delattr(others, name)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
        by_shape: dict[torch.Size, list[_Part]] = defaultdict(list)
        for matrix in matrices:
            for part in self._parts(matrix):
                by_shape[part.weight.shape].append(part)
        way = _update_by_kernels if self._step_supports_amp_scaling else _update
        skipped = vars(self).get("found_inf")
        for shape, parts in by_shape.items():
            way(
                parts,
                momentum=group["momentum"],
                # Outputs change by a similar amount, regardless of the number of inputs.
                rate=group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5,
                kept=1.0 - group["lr"] * group["weight_decay"],
                divisor=vars(self).get("grad_scale"),
                skipped=skipped,
            )
        if matrices:
            updates = [self.state[matrix]["updates"] for matrix in matrices]
            one = torch.ones_like(updates[0]) if skipped is None else 1.0 - skipped
            torch._foreach_add_(updates, [one] * len(updates))  # with a tensor instead of a list, the host would wait

    def _parts(self, matrix: Tensor) -> list[_Part]:
        assert matrix.grad is not None
        state = self.state[matrix]
        if not state:
            state["updates"], state["momentum"] = torch.zeros((), device=matrix.device), torch.zeros_like(matrix)
            state["variance"] = torch.zeros(len(matrix), device=matrix.device)
        rows = list(self._row_parts.get(matrix, [len(matrix)]))
        whole = (matrix, matrix.grad, state["momentum"], state["variance"])
        divided = zip(*(torch.split(each, rows) for each in whole), strict=True)
        return [_Part._make((*part, state["updates"])) for part in divided]


class _Part(NamedTuple):
    """A matrix, or a slice of its rows."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    variance: Tensor
    """Running second moment of each row's updates."""
    updates: Tensor
    """Number of updates so far."""


def _update(parts: Sequence[_Part], *, momentum: float, rate: float, kept: float, **unused: None) -> None:
    """weight <- kept * weight - rate * direction, for parts of one shape."""
    weights, gradients, momenta, variances, updates = (list(each) for each in zip(*parts, strict=True))
    mu = momentum_at(int(updates[0]), momentum)
    torch._foreach_lerp_(momenta, gradients, 1.0 - mu)
    directions = orthogonal(torch.stack(torch._foreach_lerp(gradients, momenta, mu)))  # Nesterov momentum
    directions = directions * row_factors(directions, variances, updates[0]).unsqueeze(2)
    if kept != 1.0:
        torch._foreach_mul_(weights, kept)
    torch._foreach_add_(weights, list(directions.to(weights[0].dtype).unbind()), alpha=-rate)


def _update_by_kernels(
    parts: Sequence[_Part],
    *,
    momentum: float,
    rate: float,
    kept: float,
    divisor: Tensor | None,
    skipped: Tensor | None,
) -> None:
    """The same on a GPU; gradients are unscaled, and the update may be skipped."""
    kernels = room("kernels")  # Triton
    weights, gradients, momenta, variances, updates = (list(each) for each in zip(*parts, strict=True))
    one = torch.ones_like(updates[0])
    skipped = 1.0 - one if skipped is None else skipped
    ahead = kernels.muon_look_ahead(
        gradients,
        momenta,
        updates=updates[0],
        divisor=one if divisor is None else divisor,
        skipped=skipped,
        momentum=(FIRST_MOMENTUM, momentum, MOMENTUM_STEPS),
    )
    directions = raised(ahead)
    factors = row_factors(directions, variances, updates[0], skipped=skipped)
    kernels.muon_apply(weights, directions, factors, rate=rate, kept=kept, skipped=skipped)


def momentum_at(step: int, momentum: float) -> float:
    """`step` counts from 0."""
    return FIRST_MOMENTUM + (momentum - FIRST_MOMENTUM) * min(1.0, step / MOMENTUM_STEPS)


def row_factors(
    directions: Tensor, variances: list[Tensor], updates: Tensor, *, skipped: Tensor | None = None
) -> Tensor:
    """Row scales, (N, rows, columns) -> (N, rows), that preserve the norm of each matrix.

    variances: N of (rows,), updated unless the update is skipped
    """
    squares = torch.linalg.vector_norm(directions, dim=2, dtype=torch.float32).square() / directions.size(2)
    before = torch.stack(variances)
    after = before.lerp(squares, 1.0 - _VARIANCE_BETA)
    torch._foreach_copy_(
        variances, list((after if skipped is None else torch.where(skipped > 0, before, after)).unbind())
    )
    factors = 1.0 / ((after / (1.0 - _VARIANCE_BETA ** (updates + 1.0))).sqrt() + 1e-8)
    left = (squares * factors.square()).sum(1, keepdim=True) + 1e-30
    kept_norm: Tensor = (squares.sum(1, keepdim=True) / left).sqrt()
    return factors * kept_norm


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors, and singular values close to 1: (N, rows, columns) -> the same.

    A zero matrix stays zero. On CUDA, matmuls are bfloat16, whose error is smaller than the remaining deviation anyway.
    """
    norms = matrices.square().sum((1, 2), keepdim=True).sqrt()  # (N, 1, 1), at least the largest singular value
    x = matrices / (norms * 1.02 + 1e-7)
    return raised(x.bfloat16() if x.is_cuda else x)


def raised(x: Tensor) -> Tensor:
    """Raise singular values from between 0 and 1 to close to 1: (N, rows, columns) -> the same."""
    tall = x.size(1) > x.size(2)
    for a, b, c in _ITERATIONS:
        gram = torch.bmm(x.mT, x) if tall else torch.bmm(x, x.mT)  # (N, m, m), m the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        x = torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x)
    return x
