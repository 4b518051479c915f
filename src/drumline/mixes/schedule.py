"""Which source each position of a mix takes, and which item of it: a function of the seed and the position alone.

The positions of the run, sequence by sequence, come in stages of constant weights, and those in blocks. Each block has
of every source as many positions as its weight says, rounded so that the sums over blocks stay within one of exact,
in the order of a keyed permutation. The j-th position of a source, over all stages, takes the j-th item of its own
endless stream of epochs. Any position is computed from its block: step one billion is as cheap as step zero.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from drumline.config import MixStage
from drumline.data import mix
from drumline.errors import ConfigError

BLOCK = 1000
"""Positions per block: no weight may be less than one of so many."""
_ORDER_OF_SOURCES = 0x6D6978
"""Keeps the keys of blocks apart from other hashes of the seed."""


@dataclass(frozen=True)
class Stretch:
    """Positions of constant weights, up to the next one."""

    start: int
    shares: tuple[Fraction, ...]
    """Of each source; their sum is 1."""
    before: tuple[int, ...]
    """Positions that each source has had before."""

    def until_block(self, block: int) -> list[int]:
        """Positions of each source in the first `block` blocks.

        Sums of shares are rounded, not shares: what the sources have adds up, and is never less than before.
        """
        edges = [0, *(math.floor(block * BLOCK * edge + Fraction(1, 2)) for edge in accumulate(self.shares))]
        return [above - below for below, above in pairwise(edges)]


class Schedule:
    """The sources of a mix, position by position."""

    def __init__(
        self, shares: Sequence[Fraction], stages: Sequence[tuple[int, int | None, Sequence[Fraction]]], *, seed: int
    ) -> None:
        """shares: of each source, where no stage is. stages: first position, the one after its last, and shares"""
        self._seed, self.shares, self.stages = seed, shares, stages
        self.stretches: list[Stretch] = []
        self._block = lru_cache(maxsize=8)(self._block_of)
        at, zeros = 0, (0,) * len(shares)
        pieces: list[tuple[int, Sequence[Fraction]]] = []
        for start, stop, own in sorted(stages, key=lambda each: each[0]):
            if start > at or (not pieces and start > 0):
                pieces.append((at, shares))
            pieces.append((start, own))
            at = start if stop is None else stop
            if stop is None:
                break
        else:
            pieces.append((at, shares))
        for start, own in pieces:
            before = tuple(self.seen(start)) if self.stretches else zeros
            self.stretches.append(Stretch(start, tuple(own), before))

    def at(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each position, and its number in the stream of that source: int64 (N,), int64 (N,)"""
        sources, numbers = np.empty_like(positions), np.empty_like(positions)
        starts = [each.start for each in self.stretches]
        for place, position in enumerate(positions.tolist()):
            stretch = bisect_right(starts, position) - 1
            block, inside = divmod(position - starts[stretch], BLOCK)
            of_block, numbers_of_block = self._block(stretch, block)
            sources[place], numbers[place] = of_block[inside], numbers_of_block[inside]
        return sources, numbers

    def seen(self, position: int) -> list[int]:
        """Positions of each source before this one."""
        stretch = max(0, bisect_right([each.start for each in self.stretches], position - 1) - 1)
        own = self.stretches[stretch]
        block, inside = divmod(position - own.start, BLOCK)
        part = np.bincount(self._block(stretch, block)[0][:inside], minlength=len(own.shares)).tolist()
        return [a + b + c for a, b, c in zip(own.before, own.until_block(block), part, strict=True)]

    def shares_at(self, position: int) -> tuple[Fraction, ...]:
        """What of the positions around this one each source has."""
        return self.stretches[bisect_right([each.start for each in self.stretches], position) - 1].shares

    def _block_of(self, stretch: int, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each position of a block, and its number in the stream of that source."""
        own = self.stretches[stretch]
        first = np.array(own.until_block(block), dtype=np.int64)
        counts = np.array(own.until_block(block + 1), dtype=np.int64) - first
        key = mix(self._seed, _ORDER_OF_SOURCES, own.start, block)
        places = np.argsort([mix(key, place) for place in range(BLOCK)], kind="stable")
        sources = np.repeat(np.arange(len(counts)), counts)[places]
        in_order = np.argsort(sources, kind="stable")
        numbers = np.empty(BLOCK, dtype=np.int64)
        # Sorted by source, the positions of each follow each other: numbered from the first of its own.
        numbers[in_order] = np.arange(BLOCK) + np.repeat(first + own.before - np.cumsum(counts) + counts, counts)
        return sources, numbers


def normalized(weights: Sequence[Fraction], names: Sequence[str]) -> tuple[Fraction, ...]:
    """Weights of any sum as shares of it; refuses a share that a block has no position for."""
    total = sum(weights, Fraction(0))
    shares = tuple(weight / total for weight in weights)
    for name, share in zip(names, shares, strict=True):
        if 0 < share * BLOCK < 1:
            raise ConfigError(
                f"{name} would be {float(share):.3g} of the mix, less than one of {BLOCK:,} sequences",
                fix="give it more weight, or leave it out",
            )
    return shares


def stretches_of(
    stages: Sequence[MixStage], names: Sequence[str], *, sequences: int, total_steps: int
) -> list[tuple[int, int | None, tuple[Fraction, ...]]]:
    """Stages by their positions; those that the run has no step of are left out."""
    found: list[tuple[int, int | None, tuple[Fraction, ...]]] = []
    for stage in stages:
        start, stop = (_step(each, total_steps) for each in (stage.start, stage.stop))
        assert start is not None
        shares = normalized([stage.weights.get(name, Fraction(0)) for name in names], names)
        if stop is None or start < stop:
            found.append((start * sequences, None if stop is None else stop * sequences, shares))
    found.sort(key=lambda each: each[0])
    for (_, stop, _), (start, _, _) in pairwise(found):
        if stop is None or start < stop:
            last = "the end" if stop is None else f"step {stop // sequences:,}"
            raise ConfigError(
                f"a stage that begins after step {start // sequences:,} overlaps one that lasts until {last}",
                fix="let each stage begin where the one before it ends",
            )
    return found


def _step(place: int | Fraction | None, total_steps: int) -> int | None:
    return round(place * total_steps) if isinstance(place, Fraction) else place
