"""How FSDP gathers weights and sums gradients, with what a rank waits for said, and its time left out of its work.

torch calls these for each unit of a model: `Gathered` before forward and backward, `Summed` or `InTree` after backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drumline.parallel import Stopwatch, SumTree, waiting_for

# torch 2.13 renamed these and warns about the old names, the only ones that 2.11 knows.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass
class Round:
    """The micro-batch that all ranks are computing now, each its own."""

    indices: Sequence[int | None] = ()
    """By rank: its index in the step, None if this rank has none left and computes one in vain."""
    own: int | None = None
    is_last: bool = True
    watch: Stopwatch | None = field(default=None, repr=False)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The time in here is no work of this rank."""
        began_s = time.perf_counter()
        with waiting_for(what):
            yield
        if self.watch is not None:
            self.watch.leave_out(time.perf_counter() - began_s)


class _Allocating:
    def __init__(self, now: Round) -> None:
        self._now = now

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gathered(_Allocating):
    """Every rank's part of a unit's weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._now.waiting("the weights of the other ranks"):
            work: dist.Work | None = _ALL_GATHER(output_tensor, input_tensor, group, async_op)
        return work


class Summed(_Allocating):
    """The sum over the ranks of a group, of which each rank gets its part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._now.own is None:
            input_tensor.zero_()  # not times zero: that would keep a NaN
        with self._now.waiting("the sum of the gradients"):
            if not input_tensor.is_cpu:
                work: dist.Work | None = _REDUCE_SCATTER(output_tensor, input_tensor, group=group, async_op=async_op)
                return work
            received = torch.empty_like(input_tensor)  # gloo's reduce-scatter would sum all of it on each rank
            dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, out=output_tensor)
        return None


class InTree(_Allocating):
    """The sum over all ranks and micro-batches of a step in one binary tree over their indices.

    Each micro-batch's gradient is exchanged, so that each rank has every micro-batch's gradient for a slice of its
    part, and adds it to the tree of that slice. With several replicas, each finishes another slice of the part they
    share, and the sum over replicas that follows puts the slices together: what a replica has not finished is -0, the
    only number that changes no bit of what it is added to. So is what comes before the last micro-batch.
    """

    def __init__(self, now: Round, *, replicas: int) -> None:
        super().__init__(now)
        self._replicas, self._tree = replicas, SumTree()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object = None,
        async_op: bool = False,
    ) -> None:
        shards, replicas, length = group.size(), self._replicas, output_tensor.numel()
        slice_length = -(-length // replicas)
        sent = input_tensor.new_zeros(replicas, shards, slice_length)
        parts = torch.nn.functional.pad(input_tensor.view(shards, length), (0, replicas * slice_length - length))
        sent.copy_(parts.view(shards, replicas, slice_length).transpose(0, 1))
        received = torch.empty_like(sent)  # by rank of the world: its micro-batch, my slice
        with self._now.waiting("the sum of the gradients"):
            dist.all_to_all_single(received, sent)
        self.take(output_tensor, received.view(replicas * shards, slice_length), dist.get_rank() // shards)

    def take(self, output: Tensor, received: Tensor, replica: int) -> None:
        """Add what every rank has computed: (ranks, slice); after the last round, finish this replica's slice."""
        for index, gradient in zip(self._now.indices, received, strict=True):
            if index is not None:
                self._tree.add((index, 1), gradient)
        output.fill_(-0.0)
        if self._now.is_last:
            total, self._tree = self._tree.finished(), SumTree()
            place = output[replica * total.numel() : (replica + 1) * total.numel()]
            place.copy_(total[: place.numel()])
        else:
            self._tree.keep_own_copies()

    def forget(self) -> None:
        """What an interrupted step left."""
        self._tree = SumTree()
