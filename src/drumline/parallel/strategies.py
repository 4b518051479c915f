"""Strategies: how the gradients of a step's micro-batches, computed here and on other ranks, become one gradient.

Each wraps a model for training and turns a rank's share of micro-batches into the gradient of the whole step, in
`parameter.grad`, the same on every rank. `plain` is for one process; `ddp` lets torch add gradients up while backward
still runs; `bitwise` adds them in one fixed tree, so that the sum has the same bits on any number of ranks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumline.data import BatchPlan
from drumline.parallel.heartbeat import waiting_for
from drumline.parallel.stragglers import Stopwatch
from drumline.parallel.world import World

# torch 2.13 gave this argument a new name and warns about the old one, which is all that 2.11 knows.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)

Backward = Callable[[nn.Module, Any], Tensor]
"""(model, micro-batch) -> its share of the step's loss, after running backward on it."""

Votes = Sequence[bool]
"""This rank's answers to the questions that all ranks decide together after a step."""


class Strategy(Protocol):
    scale: int
    """What every loss is multiplied with before backward, because the strategy divides by it."""
    looks_ahead: bool
    """Whether a step's gradient is to be started before the numbers of the step before it are read."""

    def accumulate(
        self, micro_batches: Iterable[Any], backward: Backward, *, votes: Votes, watch: Stopwatch | None = None
    ) -> Tensor:
        """Leave the whole step's gradient in every parameter's .grad.

        Gives float32 (1 + votes + ranks,), the same on every rank: the whole step's loss, how many ranks voted for each
        question, and if there is a stopwatch, what each rank's own work took. All of it travels with the loss, so that
        it costs no message of its own.
        """


def make_strategy(model: nn.Module, plan: BatchPlan, world: World, *, bitwise: bool) -> Strategy:
    if bitwise:
        return Bitwise(model, plan, world)
    return Plain(model) if world.store is None else Ddp(model, plan, world)


class Plain:
    """One process: backward adds gradients up by itself."""

    scale = 1
    looks_ahead = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def accumulate(
        self, micro_batches: Iterable[Any], backward: Backward, *, votes: Votes, watch: Stopwatch | None = None
    ) -> Tensor:
        return message(torch.stack([backward(self._model, batch) for batch in micro_batches]).sum(), votes, watch)


class Ddp:
    """torch's DistributedDataParallel: gradients meet once a step, bucket by bucket, while backward goes on."""

    looks_ahead = False

    def __init__(self, model: nn.Module, plan: BatchPlan, world: World) -> None:
        self.scale = world.size  # it averages over the ranks, and losses are already shares of the whole step
        self._world, self._last = world, len(plan.share(world.rank, world.size)) - 1
        most = len(plan.share(0, world.size))
        buffers: dict[str, Any] = {
            _SYNC_BUFFERS: bool(model.state_dict().keys() - dict(model.named_parameters()).keys())
        }
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **buffers,
            static_graph=most == 1,  # with accumulation the first backward of a step is not synchronised
        )

    def accumulate(
        self, micro_batches: Iterable[Any], backward: Backward, *, votes: Votes, watch: Stopwatch | None = None
    ) -> Tensor:
        losses = []
        for number, batch in enumerate(micro_batches):
            with contextlib.nullcontext() if number == self._last else self._ddp.no_sync():
                losses.append(backward(self._ddp, batch))
        own = message(torch.stack(losses).sum(), votes, watch)
        with waiting_for("the sum of the losses"):
            return self._world.sum(own)


class Bitwise:
    """Micro-batches' gradients added in one binary tree over their indices, whoever computed them.

    The tree has a node for every aligned block of 2^k micro-batches. A rank adds up the blocks that lie whole in its
    share; what is left, at most two blocks of each size, is exchanged so that each rank finishes the tree for a slice
    of the gradient, and the finished slices are gathered.
    """

    scale = 1
    looks_ahead = False

    def __init__(self, model: nn.Module, plan: BatchPlan, world: World) -> None:
        self._model, self._plan, self._world = model, plan, world
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        shares = [plan.share(rank, world.size) for rank in range(world.size)]
        self._blocks = [[_span(block) for block in _blocks(share)] for share in shares]
        self._share = shares[world.rank]
        world.broadcast([tensor.detach() for tensor in model.state_dict(keep_vars=True).values()])  # as DDP does

    def accumulate(
        self, micro_batches: Iterable[Any], backward: Backward, *, votes: Votes, watch: Stopwatch | None = None
    ) -> Tensor:
        tree = _Tree()
        for index, batch in zip(self._share, micro_batches, strict=True):
            for parameter in self._parameters:
                parameter.grad = None
            loss = backward(self._model, batch)
            last = index == self._share[-1]  # a rank has one vote and one time, however many micro-batches
            tree.add((index, 1), self._flat(message(loss, [last and vote for vote in votes], watch, filled=last)))
        total = self._exchange(tree.blocks)
        return total[self._unflatten(total) :]

    def _flat(self, message: Tensor) -> Tensor:
        """Every gradient and what goes with the loss in one vector."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([g.reshape(-1).float() for g in grads] + [message])

    def _unflatten(self, total: Tensor) -> int:
        """Gives where the gradients end."""
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            parameter.grad = total[start:stop].view_as(parameter).to(parameter.dtype)
            start = stop
        return start

    def _exchange(self, own: dict[tuple[int, int], Tensor]) -> Tensor:
        """Finish the tree over all ranks' blocks."""
        size, length = self._world.size, next(iter(own.values())).numel()
        if self._world.store is None:
            return _finish(own)
        most, slice_length = max(map(len, self._blocks)), -(-length // size)
        sent = next(iter(own.values())).new_zeros(size, most, slice_length)
        for number, vector in enumerate(own.values()):
            padded = torch.nn.functional.pad(vector, (0, slice_length * size - length))
            sent[:, number] = padded.view(size, slice_length)
        received = torch.empty_like(sent)  # (rank that computed it, its block, my slice)
        with waiting_for("the sum of the gradients"):
            dist.all_to_all_single(received, sent)
        mine = {
            block: received[rank, number]
            for rank, blocks in enumerate(self._blocks)
            for number, block in enumerate(blocks)
        }
        total = sent.new_empty(size * slice_length)
        finished = _finish(mine)
        with waiting_for("the sum of the gradients"):
            dist.all_gather(list(total.view(size, slice_length).unbind()), finished)
        return total[:length]


def message(loss: Tensor, votes: Votes, watch: Stopwatch | None, *, filled: bool = True) -> Tensor:
    """What travels with the loss; filled: whether this one tells what the stopwatch shows"""
    # Filled in on the device: a copy from the host would wait until backward has ended, then the device for the host.
    told = [loss.reshape(1), *(loss.new_full((1,), float(vote)) for vote in votes)]
    return torch.cat(told if watch is None else [*told, watch.slots(loss, filled=filled)])


class _Tree:
    """Adds neighbours up as soon as both are there, so that only unpaired blocks are held."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], Tensor] = {}

    def add(self, block: tuple[int, int], value: Tensor) -> None:
        """block: (first micro-batch, number of micro-batches), the number a power of two that divides the first."""
        start, count = block
        neighbour = (start ^ count, count)
        if neighbour in self.blocks:
            other = self.blocks.pop(neighbour)
            self.add((min(start, neighbour[0]), 2 * count), other + value)
        else:
            self.blocks[block] = value


def _finish(blocks: dict[tuple[int, int], Tensor]) -> Tensor:
    """The whole sum: pair up what pairs, then add what stays unpaired from left to right."""
    tree = _Tree()
    for block in sorted(blocks):
        tree.add(block, blocks[block])
    parts = [tree.blocks[block] for block in sorted(tree.blocks)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _blocks(share: range) -> list[range]:
    """The fewest aligned blocks of 2^k micro-batches that make up a share, in the order that a _Tree leaves them."""
    found, start = [], share.start
    while start < share.stop:
        count = start & -start or 1 << (share.stop - 1).bit_length()
        while start + count > share.stop:
            count //= 2
        found.append(range(start, start + count))
        start += count
    return found


def _span(block: range) -> tuple[int, int]:
    return block.start, len(block)
