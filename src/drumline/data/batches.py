"""Which sequences step k uses, and a rank's share of them: computed from (seed, step), nothing to store or resume.

The training data is an endless stream of epochs, each visiting every item once in its own order. Step k takes the next
`plan.sequences` items of that stream. The order is a keyed permutation that is computed item by item, so step one
million is as cheap as step zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.config import SHORT_PARTS, BatchConfig
from drumline.data.tokens import TokenFile
from drumline.lazy import room
from drumline.units import counted

_ROUNDS = 8
_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """A 63-bit hash of integers (splitmix64, chained), as a random seed: mix(seed, step, micro_batch)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state ^= state >> 27
        state = state * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer, elementwise; the arithmetic wraps at 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def visit_order(positions: NDArray[np.int64], *, items: int, seed: int) -> NDArray[np.int64]:
    """The item that each position of the endless stream visits.

    positions: int64 (N,), any order; position p lies in epoch p // items
    returns:   int64 (N,), each in [0, items)
    """
    epochs, places = np.divmod(positions, items)
    keys = {epoch: mix(seed, epoch) for epoch in np.unique(epochs).tolist()}
    key = np.array([keys[epoch] for epoch in epochs.tolist()], dtype=np.uint64)
    # An unbalanced Feistel network permutes [0, 2^bits), the smallest power of two that holds all items; a value that
    # falls outside is permuted again until it is inside ("cycle walking"), which keeps it a permutation.
    bits = max(2, (items - 1).bit_length())
    low_bits, low_mask = np.uint64(bits // 2), np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    values, walking = places.astype(np.uint64), np.ones(len(places), dtype=bool)
    while walking.any():
        low, high, round_key = values[walking] & low_mask, values[walking] >> low_bits, key[walking]
        for turn in range(_ROUNDS):
            round_key = _scramble(round_key + np.uint64(turn + 1))
            if turn % 2:
                low ^= _scramble(high ^ round_key) & low_mask
            else:
                high ^= _scramble(low ^ round_key) & high_mask
        values[walking] = (high << low_bits) | low
        walking = values >= np.uint64(items)
    return values.astype(np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """A step is `micro_batches` micro-batches of `micro_batch_size` sequences, regardless of the number of ranks."""

    micro_batch_size: int
    micro_batches: int

    @property
    def sequences(self) -> int:
        return self.micro_batch_size * self.micro_batches

    def share(self, rank: int, world_size: int) -> range:
        """The micro-batches of rank `rank`: a contiguous range; the first ranks take one more if uneven."""
        if world_size > self.micro_batches:
            from drumline.config import refuse_ranks

            refuse_ranks(world_size, self.micro_batches, batch_size=self.micro_batch_size)
        each, extra = divmod(self.micro_batches, world_size)
        start = rank * each + min(rank, extra)
        return range(start, start + each + (rank < extra))

    def formula(self, world_size: int) -> str:
        """How a step's batch is made up: batch_size 8 x 4 ranks x 2 accumulated."""
        shares = [len(self.share(rank, world_size)) for rank in range(world_size)]
        size, ranks = f"batch_size {self.micro_batch_size}", counted(world_size, "rank")
        if len(set(shares)) == 1:
            return f"{size} x {ranks} x {shares[0]} accumulated"
        return f"{size} x {self.micro_batches} micro-batches ({' + '.join(map(str, shares))} on {ranks})"


def plan_batches(batch: BatchConfig, *, default_batch_size: int, world_size: int) -> BatchPlan:
    """Total = batch_size x world_size x gradient_accumulation_steps, or global_batch_size, split into micro-batches."""
    if batch.global_batch_size is None:
        accumulated = batch.gradient_accumulation_steps or 1
        return BatchPlan(batch.batch_size or default_batch_size, micro_batches=world_size * accumulated)
    total, accumulates = batch.global_batch_size, batch.gradient_accumulation_steps is not None
    size = batch.batch_size or max(d for d in range(1, min(default_batch_size, total) + 1) if total % d == 0)
    if accumulates or total % size:
        from drumline.config import refuse_batch

        refuse_batch(batch, size=None if accumulates else size)
    return BatchPlan(micro_batch_size=size, micro_batches=total // size)


class Batches(Protocol):
    """What the training loop needs from its data."""

    plan: BatchPlan
    items: int
    """Number of items (sequences, samples) per epoch."""
    tokens_per_item: int
    """Tokens per item; 1 for items that are not text. The weight of an item in the loss."""

    def micro_batch(self, step: int, index: int) -> Any:
        """Micro-batch `index` of step `step`, as tensors on the CPU."""

    def names(self, step: int, index: int | None = None) -> list[str]:
        """A readable description of where the items of a step, or of one of its micro-batches, come from."""


def visits(batches: Batches, seed: int, step: int, index: int | None = None) -> NDArray[np.int64]:
    """The items of a micro-batch, or of a whole step, in order."""
    plan = batches.plan
    start = step * plan.sequences + (index or 0) * plan.micro_batch_size
    count = plan.sequences if index is None else plan.micro_batch_size
    return visit_order(np.arange(start, start + count, dtype=np.int64), items=batches.items, seed=seed)


class TokenBatches:
    """Windows of `context` tokens from a token file; the targets are the tokens shifted by one.

    Steps before `short_steps` split each window into four that do not attend to each other: same tokens, same targets,
    in the same order.
    """

    short_steps = 0
    facts: Mapping[str, Any] = {}
    """What more must not change when a run is resumed."""

    def __init__(
        self, tokens: TokenFile, plan: BatchPlan, *, context: int, seed: int, document_mask: bool = False
    ) -> None:
        self.plan, self.tokens_per_item, self.items = plan, context, (len(tokens) - 1) // context
        self._tokens, self._context, self._seed = tokens, context, seed
        if self.items < 1 or (document_mask and tokens.end_of_text is None):
            from drumline.data.opening import refuse_batches

            refuse_batches(tokens, context)
        self._end_of_text = tokens.end_of_text if document_mask else None

    def micro_batch(self, step: int, index: int) -> tuple[Any, ...]:
        """inputs int64 (B, T), targets int64 (B, T), document ids int64 (B, T) or None"""
        windows = self.windows(step, index)
        batch = window_batch(self._tokens, windows, context=self._context, end_of_text=self._end_of_text)
        return tuple(None if part is None else part.reshape(-1, self.context_of(step)) for part in batch)

    def windows(self, step: int, index: int | None = None) -> list[int]:
        """The windows of a micro-batch, or of a whole step, in order; window w begins at token w * context."""
        return [int(window) for window in visits(self, self._seed, step, index)]

    def visited(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows at some places of the endless stream, int64 (N,)."""
        return visit_order(positions, items=self.items, seed=self._seed)

    def context_of(self, step: int) -> int:
        """Sequence length in this step."""
        return self._context // SHORT_PARTS if step < self.short_steps else self._context

    def names(self, step: int, index: int | None = None) -> list[str]:
        from drumline.data.opening import names_of_windows

        return names_of_windows(self._tokens, self.windows(step, index), self._context)


def window_batch(
    tokens: TokenFile, windows: Sequence[int], *, context: int, end_of_text: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Windows as (inputs, targets, document ids); a file's last window may be short: its missing targets are -100."""
    if tokens.packer:
        return room(tokens.packer).packed_batch(tokens, windows, context=context, end_of_text=end_of_text)  # type: ignore[no-any-return]
    rows = np.full((len(windows), context + 1), -100, dtype=np.int64)
    for row, window in zip(rows, windows, strict=True):
        read = tokens.read(window * context, min(len(tokens), (window + 1) * context + 1))
        row[: len(read)] = read
    block = torch.from_numpy(rows)  # (B, T + 1)
    inputs, targets = block[:, :-1].clamp(min=0), block[:, 1:].contiguous()
    documents = None
    if end_of_text is not None:
        # The end-of-text token still belongs to the document that it ends.
        ends = (inputs == end_of_text).long()
        documents = ends.cumsum(1) - ends
    return inputs, targets, documents
