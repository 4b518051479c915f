"""Who writes which piece, and who sends which rows to whom: pure functions, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from drumline.pieces.rows import Range, Spread, piece_name, spread_of


def divide(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Names distributed so that parts have about the same size; the same on every rank."""
    dealt: list[list[str]] = [[] for _ in range(parts)]
    load = [0] * parts
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = load.index(min(load))
        dealt[lightest].append(name)
        load[lightest] += sizes[name]
    return dealt


def own_pieces(tensors: Mapping[str, Tensor], rank: int, keepers: Sequence[int]) -> list[str]:
    """The pieces that a rank keeps, if these ranks keep what they have between them, each row once."""
    if rank not in keepers:
        return []
    whole: dict[str, int] = {}
    shared: dict[Spread, dict[str, int]] = {}
    for name, tensor in tensors.items():
        spread = spread_of(tensor)
        if spread is None:
            whole[name] = tensor.nbytes
            continue
        start, stop = spread.rows(len(tensor), rank)
        if start < stop:
            size = (stop - start) * (tensor.nbytes // len(tensor))
            shared.setdefault(spread, {})[piece_name(name, start, stop, len(tensor))] = size
    own = divide(whole, len(keepers))[list(keepers).index(rank)]
    for spread, sizes in shared.items():
        replicas = [each for each in next(ranks for ranks in spread.holders if rank in ranks) if each in keepers]
        own += divide(sizes, len(replicas))[replicas.index(rank)]
    return own


def without_writer(spreads: Iterable[Spread | None], writers: Sequence[int]) -> list[int]:
    """The ranks whose rows none of the writers has."""
    shares = [ranks for spread in set(spreads) if spread for ranks in spread.holders]
    return sorted({rank for ranks in shares if not set(ranks) & set(writers) for rank in ranks})


@dataclass(frozen=True)
class Transfer:
    """Rows that one rank sends to another."""

    name: str
    start: int
    stop: int
    source: int
    target: int


def transfers(
    needs: Mapping[str, Sequence[Range]], here: Sequence[Mapping[str, Sequence[Range]]]
) -> Iterator[Transfer]:
    """What has to be sent so that each rank has the rows that it needs. ValueError: nobody has some of them.

    needs: of each tensor, the rows that each rank needs; here: the rows of each tensor that each rank can read
    """
    sent = [0] * len(here)
    for name in sorted(needs):
        for target, need in enumerate(needs[name]):
            for start, stop in _beyond(need, here[target].get(name, ())):
                at = start
                while at < stop:
                    offers = {
                        source: max((last for first, last in there.get(name, ()) if first <= at < last), default=at)
                        for source, there in enumerate(here)
                    }
                    best = [source for source, until in offers.items() if until > at]
                    if not best:
                        raise ValueError(f"row {at} of {name} is missing")
                    source = min(best, key=lambda each: (sent[each], each))
                    until = min(stop, offers[source])
                    yield Transfer(name, at, until, source, target)
                    sent[source] += 1
                    at = until


def _beyond(need: Range, there: Sequence[Range]) -> Iterator[Range]:
    """The rows of `need` that are not there."""
    at, stop = need
    for first, last in sorted(there):
        if first > at and at < stop:
            yield at, min(first, stop)
        at = max(at, last)
    if at < stop:
        yield at, stop


def overlap(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])
