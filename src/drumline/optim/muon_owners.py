"""Muon on several ranks: each matrix is orthogonalized by one of them, its owner.

A sharded matrix (a DTensor, `[Shard(0)]`) is gathered on its owner, row by row, and its direction goes back the same
way. Ranks with the same rows (all of them without sharding, the replicas of a group of shards with it) divide the
matrices among them and exchange the directions, if that is faster than that each computes them all. Momenta and weights
are updated where they are.

Owners compute what one process would, whatever else they own: with one thread, or --bitwise, to the bit. They work in
rounds, so that none of them has more than a bounded number of whole matrices at a time. A row travels with what belongs
to it in 32 bits: there its variance, and back its factor and its new variance.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from drumline.lazy import room
from drumline.optim.muon import Part, Rules, apply, batches, directed, look_ahead, update

ROUND_SIZE = 1 << 26
"""Elements of the matrices that an owner has at a time, unless a single one is larger."""


class Price(NamedTuple):
    """What it costs to exchange directions, in the FLOPs of a rank that could be done meanwhile."""

    once: float
    byte: float


PRICES = {"cpu": Price(5e8, 1e2), "cuda": Price(2e10, 1.6e4)}
"""CPU: 10 ms and 0.5 GB/s at 50 GFLOP/s, as benchmarks/muon_ranks.py finds. CUDA: 50 us and 25 GB/s, a fast network's,
at 400 TFLOP/s, by calculation: within a host, a division pays sooner."""


class Ranks:
    """The process groups of a sharded or replicated model; of a rank alone there is none."""

    def __init__(self, shards: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None) -> None:
        """shards: ranks that have other rows of the same matrices; replicas: ranks that have the same rows"""
        self.shards, self.replicas = shards, replicas

    @cached_property
    def shard(self) -> tuple[int, int]:
        """Number of this rank among the shards, and how many they are."""
        return _place(self.shards)

    @cached_property
    def replica(self) -> tuple[int, int]:
        return _place(self.replicas)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def ranks_of(mesh: DeviceMesh | None) -> Ranks:
    """mesh: of the shards, perhaps with replicas before; None: every rank has everything"""
    if mesh is None:
        return Ranks(None, _several(dist.group.WORLD))
    return Ranks(_several(mesh.get_group(mesh.ndim - 1)), _several(mesh.get_group(0)) if mesh.ndim > 1 else None)


def _several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return group if dist.get_world_size(group) > 1 else None


def local_rows(sharded: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """This rank's rows of DTensors with the same rows, and the number of the first one."""
    matrix = sharded[0]
    mesh = matrix.device_mesh  # type: ignore[attr-defined]
    share = rows_of_shard(mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), len(matrix))
    local = [each.to_local() for each in sharded]  # type: ignore[attr-defined]
    assert all(len(each) == len(share) for each in local), "not sharded by rows"
    return local, share.start


def rows_of_shard(shard: int, shards: int, rows: int) -> range:
    """As torch divides a dimension: the last shards may have fewer, or none."""
    most = -(-rows // shards)
    return range(min(shard * most, rows), min((shard + 1) * most, rows))


def update_on_ranks(parts: Sequence[Part], rules: Rules, *, mesh: DeviceMesh | None) -> None:
    """`muon.update`, by all ranks together."""
    ranks = ranks_of(mesh)
    if ranks.replicas is not None and not pays(parts, ranks):
        ranks = Ranks(ranks.shards, None)
    # Weights that are kept in the memory of the host are updated there, but orthogonalized on the GPU.
    offloaded = mesh is not None and mesh.device_type == "cuda" and not parts[0].weight.is_cuda
    if ranks.shards is None and ranks.replicas is None and not offloaded:
        update(parts, rules)
    else:
        device = torch.device("cuda", torch.cuda.current_device()) if offloaded else parts[0].weight.device
        update_by_owners(parts, rules, ranks, device=device, size=ROUND_SIZE)


def pays(parts: Sequence[Part], ranks: Ranks) -> bool:
    """Whether replicas should divide the matrices, instead of each one doing the same work."""
    price, others = PRICES["cuda" if parts[0].weight.is_cuda else "cpu"], 1.0 - 1.0 / ranks.replica[1]
    flops = sum(cost(len(part.rows), part.weight.size(1)) for part in parts) / ranks.shard[1]
    size = sum(part.weight.numel() for part in parts) * (2 if parts[0].weight.is_cuda else 4)
    return flops * others >= price.once + price.byte * size * others


def cost(rows: int, columns: int) -> float:
    """FLOPs of an orthogonalization: four iterations of two products of a matrix and one of its shorter sides."""
    short, long = sorted((rows, columns))
    return 4.0 * (4.0 * short * short * long + 2.0 * short**3)


class _Shape(NamedTuple):
    """Of a part, as every rank knows it."""

    rows: range
    parameter_rows: int
    columns: int

    def on(self, shard: int, shards: int) -> int:
        """How many of its rows a shard has."""
        share = rows_of_shard(shard, shards, self.parameter_rows)
        return max(0, min(self.rows.stop, share.stop) - max(self.rows.start, share.start))


@lru_cache(maxsize=8)
def rounds(shapes: tuple[_Shape, ...], owners: int, size: int) -> list[list[list[int]]]:
    """Round -> owner -> the parts, by number, that it has then. Their work is as even as can be.

    size: the elements of whole matrices that an owner has in a round, unless there is a single one
    """
    load, owned = [(0.0, owner) for owner in range(owners)], [[0] * 0 for _ in range(owners)]
    # The most expensive first, and those of one shape together: they are one batch.
    order = sorted(range(len(shapes)), key=lambda n: (-_cost(shapes[n]), len(shapes[n].rows), n))
    for number in order:
        work, owner = load[0]
        owned[owner].append(number)
        heapq.heapreplace(load, (work + _cost(shapes[number]), owner))
    in_rounds = [list(_chunks(numbers, shapes, size)) for numbers in owned]
    return [
        [chunks[number] if number < len(chunks) else [] for chunks in in_rounds]
        for number in range(max(map(len, in_rounds)))
    ]


def _cost(shape: _Shape) -> float:
    return cost(len(shape.rows), shape.columns)


def _chunks(numbers: Iterable[int], shapes: Sequence[_Shape], size: int) -> Iterable[list[int]]:
    chunk: list[int] = []
    elements = 0
    for number in numbers:
        more = len(shapes[number].rows) * shapes[number].columns
        if chunk and elements + more > size:
            yield chunk
            chunk, elements = [], 0
        chunk.append(number)
        elements += more
    if chunk:
        yield chunk


def update_by_owners(parts: Sequence[Part], rules: Rules, ranks: Ranks, *, device: torch.device, size: int) -> None:
    """`muon.update`, each whole matrix by one rank.

    device: for messages and orthogonalizations; size: as in `rounds`
    """
    shapes = tuple(_Shape(part.rows, part.parameter_rows, part.weight.size(1)) for part in parts)
    for owned in rounds(shapes, ranks.shard[1] * ranks.replica[1], size):
        _Round(parts, shapes, owned, rules, ranks, device).run()


class _Round:
    """Some matrices, at most a few for each owner."""

    def __init__(
        self,
        parts: Sequence[Part],
        shapes: Sequence[_Shape],
        owned: list[list[int]],
        rules: Rules,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """owned: the numbers of the parts of each owner, the shards of the first replica first"""
        (self._shard, self._shards), (self._replica, self._replicas) = ranks.shard, ranks.replica
        self._parts, self._shapes, self._rules, self._ranks = parts, shapes, rules, ranks
        self._of_replica = [owned[i * self._shards : (i + 1) * self._shards] for i in range(self._replicas)]
        self._owned = self._of_replica[self._replica]
        self._mine = self._owned[self._shard]
        self._like, self._device = parts[0].weight, device
        # As muon.py computes them.
        self._ahead_dtype = torch.bfloat16 if rules.by_kernels else self._like.dtype
        self._direction_dtype = torch.bfloat16 if rules.by_kernels or device.type == "cuda" else self._like.dtype

    def run(self) -> None:
        self._apply(self._exchanged(self._scattered(self._directed(self._gathered(self._looked_ahead())))))

    def _looked_ahead(self) -> dict[int, Tensor]:
        """Update the momenta of all matrices; the rows here of those of this replica, with their variances."""
        rows: dict[int, Tensor] = {}
        for replica, owned in enumerate(self._of_replica):
            for numbers in owned:
                for batch in self._local_batches(numbers):
                    ahead = look_ahead([self._parts[number] for number in batch], self._rules)
                    if replica == self._replica:
                        for number, matrix in zip(batch, ahead, strict=True):
                            rows[number] = _with_numbers(matrix, self._parts[number].variance).to(self._device)
        return rows

    def _gathered(self, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        """The whole matrices of this owner, with their variances."""
        dtype = self._ahead_dtype
        pieces = self._swapped(
            [[rows[number] for number in numbers if number in rows] for numbers in self._owned],
            [[self._piece(number, shard, dtype) for number in self._mine] for shard in range(self._shards)],
            dtype,
        )
        return {number: torch.cat([each[at] for each in pieces]) for at, number in enumerate(self._mine)}

    def _directed(self, whole: dict[int, Tensor]) -> dict[int, Tensor]:
        """Their directions, with their row factors and new variances."""
        done: dict[int, Tensor] = {}
        of = {number: (len(self._shapes[number].rows), self._shapes[number].columns) for number in self._mine}
        for batch in batches(of, next(iter(whole.values()), self._like)):
            columns = self._shapes[batch[0]].columns
            variances = [_numbers(whole[number][:, columns:])[0] for number in batch]
            ahead = torch.stack([whole.pop(number)[:, :columns] for number in batch])
            directions, factors = directed(ahead, variances, self._parts[batch[0]].updates, self._rules)
            for number, *each in zip(batch, directions, factors, variances, strict=True):
                done[number] = _with_numbers(*each)
        return done

    def _scattered(self, done: dict[int, Tensor]) -> dict[int, Tensor]:
        """The same, of the rows here of all matrices of this replica."""
        divided = [
            torch.split(done[n], [self._shapes[n].on(shard, self._shards) for shard in range(self._shards)])
            for n in self._mine
        ]
        pieces = self._swapped(
            [[each[shard] for each in divided] for shard in range(self._shards)],
            [[self._direction(number) for number in numbers] for numbers in self._owned],
            self._direction_dtype,
        )
        return dict(zip(chain(*self._owned), chain(*pieces), strict=True))

    def _exchanged(self, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        """The same, of the rows here of all matrices: every replica gives those of its own to the others."""
        if self._ranks.replicas is None:
            return rows
        in_order = [list(chain(*owned)) for owned in self._of_replica]
        shapes = [[self._direction(number) for number in numbers] for numbers in in_order]
        longest = max(_elements(each) for each in shapes)
        own = torch.zeros(longest, dtype=self._direction_dtype, device=self._device)
        torch.cat(
            [own[:0], *(rows[n].reshape(-1) for n in in_order[self._replica])],
            out=own[: _elements(shapes[self._replica])],
        )
        every = list(own.new_empty(self._replicas, longest).unbind())
        with room("parallel").waiting_for("the updates of matrices that other ranks compute"):
            dist.all_gather(every, own, group=self._ranks.replicas)
        for numbers, of, flat in zip(in_order, shapes, every, strict=True):
            rows |= zip(numbers, _cut(flat, of), strict=True)
        return rows

    def _apply(self, rows: dict[int, Tensor]) -> None:
        for batch in self._local_batches(rows):
            parts, columns = [self._parts[number] for number in batch], self._shapes[batch[0]].columns
            every = torch.stack([rows[number] for number in batch]).to(self._like.device)
            factors, variances = _numbers(every[:, :, columns:])
            torch._foreach_copy_([part.variance for part in parts], list(variances.unbind()))
            apply(parts, every[:, :, :columns], factors, self._rules)

    def _local_batches(self, numbers: Iterable[int]) -> list[list[int]]:
        """Those that have rows here, by their shape here and as a whole."""
        parts = {number: self._parts[number] for number in numbers}
        shapes = {n: (part.weight.shape, len(part.rows)) for n, part in parts.items() if len(part.weight)}
        return batches(shapes, self._like)

    def _swapped(
        self, sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]], dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """Send rows to each shard, and receive rows of these shapes from each."""
        if self._ranks.shards is None:
            return sent
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        flat = torch.cat([nothing, *(each.reshape(-1) for rows in sent for each in rows)])
        lengths = [_elements(each) for each in shapes]
        received = flat.new_empty(sum(lengths))
        with room("parallel").waiting_for("rows of matrices and their updates"):
            sizes = [sum(each.numel() for each in rows) for rows in sent]
            dist.all_to_all_single(received, flat, lengths, sizes, group=self._ranks.shards)
        return [_cut(part, of) for part, of in zip(torch.split(received, lengths), shapes, strict=True)]

    def _piece(self, number: int, shard: int, dtype: torch.dtype) -> tuple[int, int]:
        """The shape of a shard's rows with one number for each."""
        shape = self._shapes[number]
        return shape.on(shard, self._shards), shape.columns + _columns_of_a_number(dtype)

    def _direction(self, number: int) -> tuple[int, int]:
        """The shape of this shard's rows of a direction with two numbers for each."""
        rows, columns = self._piece(number, self._shard, self._direction_dtype)
        return rows, columns + _columns_of_a_number(self._direction_dtype)


def _elements(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def _cut(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Matrices that lie one after the other; what is behind them is padding."""
    lengths = [rows * columns for rows, columns in shapes]
    pieces = torch.split(flat[: sum(lengths)], lengths) if lengths else ()
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _columns_of_a_number(dtype: torch.dtype) -> int:
    """How many elements the 32 bits of a row's number take."""
    return 4 // dtype.itemsize


def _with_numbers(matrix: Tensor, *numbers: Tensor) -> Tensor:
    """With the bits of float32 numbers, (rows,), as more columns."""
    return torch.cat([matrix, *(each.contiguous().unsqueeze(1).view(matrix.dtype) for each in numbers)], dim=1)


def _numbers(columns: Tensor) -> list[Tensor]:
    return [each.contiguous() for each in columns.contiguous().view(torch.float32).unbind(-1)]
