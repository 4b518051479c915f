"""Gradients summed in a fixed tree: bitwise identical on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.data import BatchPlan
from drumline.parallel.heartbeat import waiting_for
from drumline.parallel.world import World


def fix_arithmetic(device: torch.device) -> None:
    """Make results independent of the number of CPU threads, and of the order in which GPU threads add."""
    torch.set_num_threads(1)  # with another number of threads, a matmul rounds differently
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


class Bitwise:
    """Gradients of micro-batches summed in one binary tree over their indices, whichever rank computed them.

    The tree has a node for every aligned block of 2^k micro-batches. A rank sums the blocks that are entirely in its
    share; the rest, at most two blocks of each size, is exchanged so that each rank finishes the tree for a slice of
    the gradient, and the finished slices are gathered.
    """

    scale = 1

    def __init__(self, model: nn.Module, plan: BatchPlan, world: World) -> None:
        self.model, self._world = model, world
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        shares = [plan.share(rank, world.size) for rank in range(world.size)]
        self._blocks = [[_span(block) for block in _blocks(share)] for share in shares]
        self._share = shares[world.rank]
        self._tree, self._index = SumTree(), 0
        world.broadcast([tensor.detach() for tensor in model.state_dict(keep_vars=True).values()])  # like DDP

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        if number == 0:  # discard what an interrupted step left
            self._tree = SumTree()
        self._index = self._share[number]
        for parameter in self._parameters:
            parameter.grad = None
        yield

    def add(self, loss: Tensor) -> None:
        self._tree.add((self._index, 1), self._flat(loss))

    def finish(self, extras: Tensor) -> Tensor:
        total = self._exchange(self._tree.blocks, extras)
        return total[self._unflatten(total) :]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return in_halves(torch.cat([row_squares(gradient) for gradient in gradients])).sqrt()

    def _flat(self, loss: Tensor) -> Tensor:
        """Every gradient, then the loss, in one vector."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([g.reshape(-1).float() for g in grads] + [loss.reshape(1)])

    def _unflatten(self, total: Tensor) -> int:
        """Returns where the gradients end."""
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            parameter.grad = total[start:stop].view_as(parameter).to(parameter.dtype)
            start = stop
        return start

    def _exchange(self, own: dict[tuple[int, int], Tensor], extras: Tensor) -> Tensor:
        """Finish the tree over all ranks' blocks; extras, whose sum does not depend on the order, go with the first."""
        if not self._world.is_group:
            return torch.cat((summed(own), extras))
        size, length = self._world.size, next(iter(own.values())).numel() + extras.numel()
        most, slice_length = max(map(len, self._blocks)), -(-length // size)
        sent = extras.new_zeros(size, most, slice_length)
        for number, vector in enumerate(own.values()):
            whole = torch.cat((vector, extras if number == 0 else torch.zeros_like(extras)))
            padded = torch.nn.functional.pad(whole, (0, slice_length * size - length))
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
        total_of_slice = summed(mine)
        with waiting_for("the sum of the gradients"):
            dist.all_gather(list(total.view(size, slice_length).unbind()), total_of_slice)
        return total[:length]


class SumTree:
    """Adds neighbors as soon as both exist, so that only unpaired blocks are kept."""

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

    def finished(self) -> Tensor:
        """The whole sum: the unpaired blocks are added from left to right."""
        parts = [self.blocks[block] for block in sorted(self.blocks)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def keep_own_copies(self) -> None:
        """Of what is only a view: it would keep all of a larger tensor."""
        self.blocks = {block: value if value._base is None else value.clone() for block, value in self.blocks.items()}


def summed(blocks: dict[tuple[int, int], Tensor]) -> Tensor:
    """The whole sum: add pairs first, then unpaired blocks from left to right."""
    tree = SumTree()
    for block in sorted(blocks):
        tree.add(block, blocks[block])
    return tree.finished()


def row_squares(gradient: Tensor) -> Tensor:
    """The sum of squares of each row, whose bits do not depend on the other rows: (R, ...) -> float32 (R)."""
    squares = gradient.detach().float().square()
    return in_halves(squares.flatten(1) if squares.dim() > 1 else squares.reshape(-1, 1))


def in_halves(values: Tensor) -> Tensor:
    """The sum over the last dimension in an order that does not depend on other dimensions: (..., n) -> (...)."""
    while (length := values.size(-1)) > 1:
        half = (length + 1) // 2
        total = values[..., :half].clone()
        total[..., : length - half] += values[..., half:]
        values = total
    return values.squeeze(-1)


def _blocks(share: range) -> list[range]:
    """The fewest aligned blocks of 2^k micro-batches that make up a share, in the order that a SumTree leaves them."""
    blocks, start = [], share.start
    while start < share.stop:
        count = start & -start or 1 << (share.stop - 1).bit_length()
        while start + count > share.stop:
            count //= 2
        blocks.append(range(start, start + count))
        start += count
    return blocks


def _span(block: range) -> tuple[int, int]:
    return block.start, len(block)
