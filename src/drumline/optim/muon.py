"""Muon: matrix updates are momentum with all singular values moved close to 1; other weights use AdamW.

Each row is then divided by the RMS of its recent updates, as Adam does per element ("NorMuon", Li et al., 2025), so
that all outputs of a layer learn at a similar rate.

Matrices of the same shape are orthogonalized together, as one batch of matmuls. On several ranks, muon_owners.py
divides the work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
        if not matrices:
            return
        scaling = vars(self)
        rules = Rules(
            momentum=group["momentum"],
            lr=group["lr"],
            kept=1.0 - group["lr"] * group["weight_decay"],
            divisor=scaling.get("grad_scale"),
            skipped=scaling.get("found_inf"),
            by_kernels=self._step_supports_amp_scaling,
        )
        parts = [part for matrix in matrices for part in self._parts(matrix)]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            from drumline.optim.muon_owners import update_on_ranks

            update_on_ranks(parts, rules, mesh=getattr(matrices[0], "device_mesh", None))
        else:
            update(parts, rules)
        updates = [self.state[matrix]["updates"] for matrix in matrices]
        one = torch.ones_like(updates[0]) if rules.skipped is None else 1.0 - rules.skipped
        torch._foreach_add_(updates, [one] * len(updates))  # with a tensor instead of a list, the host would wait

    def _parts(self, matrix: Tensor) -> list[Part]:
        assert matrix.grad is not None
        state, rows, first = self.state[matrix], len(matrix), 0
        if not state:
            state["updates"], state["momentum"] = torch.zeros((), device=matrix.device), torch.zeros_like(matrix)
            state["variance"] = torch.zeros_like(matrix[:, 0], dtype=torch.float32)
        here = [matrix, matrix.grad, state["momentum"], state["variance"]]
        if hasattr(matrix, "device_mesh"):
            from drumline.optim.muon_owners import local_rows

            here, first = local_rows(here)
        parts, start = [], 0
        for count in self._row_parts.get(matrix, [rows]):
            inside = slice(*(min(max(row - first, 0), len(here[0])) for row in (start, start + count)))
            weight, gradient, momentum, variance = (each[inside] for each in here)
            of = range(start, start + count)
            parts.append(Part(weight, gradient, momentum, variance, state["updates"], of, rows))
            start += count
        return parts


class Part(NamedTuple):
    """A matrix, or a slice of its rows; of a sharded one, those of its rows that this rank has."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor
    variance: Tensor
    """Running second moment of each row's updates."""
    updates: Tensor
    """Number of updates so far."""
    rows: range
    """All its rows in the parameter, wherever they are."""
    parameter_rows: int


class Rules(NamedTuple):
    """What one update of all parts has in common."""

    momentum: float
    lr: float
    kept: float
    """What the weight decay leaves of a weight."""
    divisor: Tensor | None
    """As grad_scale; None: 1."""
    skipped: Tensor | None
    """As found_inf; None: 0."""
    by_kernels: bool
    """Triton, on a GPU."""


def update(parts: Sequence[Part], rules: Rules) -> None:
    """weight <- kept * weight - rate * direction. All rows of the parts are here."""
    for numbers in batches({number: part.weight.shape for number, part in enumerate(parts)}, parts[0].weight):
        batch = [parts[number] for number in numbers]
        ahead = look_ahead(batch, rules)
        directions, factors = directed(ahead, [part.variance for part in batch], batch[0].updates, rules)
        apply(batch, directions, factors, rules)


def batches(shapes: Mapping[int, Hashable], like: Tensor) -> list[list[int]]:
    """Numbers of matrices of one shape, whose matmuls are faster as one batch.

    One by one where results must not depend on what else is in a batch, and with one thread, for which it is no slower.
    """
    alone = torch.are_deterministic_algorithms_enabled() if like.is_cuda else torch.get_num_threads() == 1
    together: dict[Hashable, list[int]] = defaultdict(list)
    for number, shape in shapes.items():
        together[number if alone else shape].append(number)
    return list(together.values())


def look_ahead(parts: Sequence[Part], rules: Rules) -> Tensor:
    """Update the momenta; returns Nesterov momentum, (N, rows, columns), for parts of one shape."""
    gradients, momenta, updates = [part.gradient for part in parts], [part.momentum for part in parts], parts[0].updates
    if rules.by_kernels:
        one = torch.ones_like(updates)
        ahead: Tensor = room("kernels").muon_look_ahead(
            gradients,
            momenta,
            updates=updates,
            divisor=one if rules.divisor is None else rules.divisor,
            skipped=_skipped(rules, updates),
            momentum=(FIRST_MOMENTUM, rules.momentum, MOMENTUM_STEPS),
        )
        return ahead
    mu = momentum_at(int(updates), rules.momentum)
    torch._foreach_lerp_(momenta, gradients, 1.0 - mu)
    return torch.stack(torch._foreach_lerp(gradients, momenta, mu))


def directed(ahead: Tensor, variances: list[Tensor], updates: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Directions, (N, rows, columns), and their row factors, (N, rows), of whole matrices; `ahead` may be overwritten.

    variances: N of (rows,), updated unless the update is skipped
    """
    if not rules.by_kernels:
        directions = orthogonal(ahead)
        return directions, row_factors(directions, variances, updates)
    room("kernels").muon_normalise(ahead)
    directions = raised(ahead)
    return directions, row_factors(directions, variances, updates, skipped=_skipped(rules, updates))


def apply(parts: Sequence[Part], directions: Tensor, factors: Tensor, rules: Rules) -> None:
    """Update the weights of parts of one shape by their rows of the directions."""
    weights = [part.weight for part in parts]
    # Outputs change by a similar amount, regardless of the number of inputs.
    rate = rules.lr * max(1.0, len(parts[0].rows) / weights[0].size(1)) ** 0.5
    if rules.by_kernels:
        skipped = _skipped(rules, parts[0].updates)
        room("kernels").muon_apply(weights, directions, factors, rate=rate, kept=rules.kept, skipped=skipped)
        return
    directions = (directions * factors.unsqueeze(2)).to(weights[0].dtype)
    if rules.kept != 1.0:
        torch._foreach_mul_(weights, rules.kept)
    torch._foreach_add_(weights, list(directions.unbind()), alpha=-rate)


def _skipped(rules: Rules, updates: Tensor) -> Tensor:
    return torch.zeros_like(updates) if rules.skipped is None else rules.skipped


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
