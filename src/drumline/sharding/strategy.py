"""The gradient of a step whose weights are spread over the ranks: each rank ends with its part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drumline.data import BatchPlan
from drumline.model import WATCHERS
from drumline.parallel import SumTree, World, in_halves, row_squares, waiting_for
from drumline.sharding.collectives import Round
from drumline.sharding.mesh import SHARD
from drumline.sharding.weights import local, rows_of_all
from drumline.sharding.wrapping import How, gathered_apart, shard


class Dealt(BatchPlan):
    """Micro-batches dealt out in turn: those computed at one time are neighbors, so the tree keeps few sums."""

    def share(self, rank: int, world_size: int) -> range:
        super().share(rank, world_size)  # refuses more ranks than micro-batches
        return range(rank, self.micro_batches, world_size)


class Sharded:
    """Gradients are summed over the ranks after each micro-batch, unit by unit, so that no rank keeps a whole one.

    Gathering and summing take all ranks, so a rank with fewer micro-batches than others computes its last one again,
    in vain.
    """

    scale = 1

    def __init__(
        self, model: nn.Module, plan: BatchPlan, world: World, how: How, *, units: Sequence[nn.Module] | None = None
    ) -> None:
        self._world, self._how, self._now = world, how, Round()
        apart = world.on_all_ranks(lambda: gathered_apart(model, units))
        self._trees = shard(model, how, self._now, units=apart)
        self.model = model
        self._shares = [plan.share(rank, world.size) for rank in range(world.size)]
        self._rounds = max(map(len, self._shares))
        self._losses: list[Tensor] = []
        self.in_vain: Callable[[], Any] = lambda: None
        """Forward and backward of this rank's last micro-batch once more."""
        self.notes: list[str] = []
        """What the start of the run says of how it is sharded."""

    @property
    def now(self) -> Round:
        return self._now

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        if number == 0:  # discard what an interrupted step left
            self._losses = []
            for tree in self._trees:
                tree.forget()
        now = self._now
        now.indices = [share[number] if number < len(share) else None for share in self._shares]
        now.own, now.is_last = now.indices[self._world.rank], number == self._rounds - 1
        if self._how.replicas > 1:
            cast(FSDPModule, self.model).set_requires_all_reduce(now.is_last)
        yield

    def add(self, loss: Tensor) -> None:
        self._losses.append(loss)

    def finish(self, extras: Tensor) -> Tensor:
        self._keep_pace()
        own = torch.cat((torch.stack(self._losses).sum().reshape(1), extras))
        with waiting_for("the sum of the losses"):
            return self._world.sum(own)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        own = [local(gradient) for gradient in gradients]
        squares = torch.nn.utils.get_total_norm(own).to(self._world.device).double().square()
        with waiting_for("the norm of the gradient"):
            dist.all_reduce(squares, group=self._how.mesh.get_group(SHARD))
        return squares.sqrt().float()

    def _keep_pace(self) -> None:
        watchers, WATCHERS[:] = WATCHERS[:], []  # these losses do not count
        try:
            for number in range(len(self._losses), self._rounds):
                with self.micro_batch(number):
                    self.in_vain()
        finally:
            WATCHERS[:] = watchers


class ShardedBitwise(Sharded):
    """The same sum as `parallel.Bitwise`, in the same tree, by parts."""

    def __init__(
        self, model: nn.Module, plan: BatchPlan, world: World, how: How, *, units: Sequence[nn.Module] | None = None
    ) -> None:
        super().__init__(model, plan, world, how, units=units)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._micro_batches = plan.micro_batches
        self._alone = SumTree()

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        if number == 0:
            self._alone = SumTree()
        with super().micro_batch(number):
            yield

    def add(self, loss: Tensor) -> None:
        super().add(loss)
        if self._world.size == 1:  # torch does not call what sums the gradients of one rank
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            self._alone.add((len(self._losses) - 1, 1), torch.cat([local(grad).reshape(-1) for grad in grads]))
            for parameter in self._parameters:
                parameter.grad = None

    def finish(self, extras: Tensor) -> Tensor:
        self._keep_pace()
        losses = extras.new_zeros(self._micro_batches)
        for index, loss in zip(self._shares[self._world.rank], self._losses, strict=True):
            losses[index] = loss
        with waiting_for("the sum of the losses"):
            totals = self._world.sum(torch.cat((losses, extras)))
        tree = SumTree()
        for index in range(self._micro_batches):
            tree.add((index, 1), totals[index])
        total = self._alone.finished() if self._world.size == 1 else None
        start = 0
        for parameter in self._parameters:
            if total is not None:
                own = local(parameter)
                parameter.grad = _like(parameter, total[start : start + own.numel()].view_as(own))
                start += own.numel()
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return torch.cat((tree.finished().reshape(1), totals[self._micro_batches :]))

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        rows = [row_squares(local(gradient)) for gradient in gradients]
        with waiting_for("the norm of the gradient"):
            return in_halves(rows_of_all(gradients, rows, self._world.device)).sqrt()


def _like(parameter: Tensor, own: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
