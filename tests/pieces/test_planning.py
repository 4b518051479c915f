"""Who writes and who sends which rows: any shapes, any ranks, any sharding."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.pieces import planning
from drumline.pieces.planning import own_pieces, transfers, without_writer
from drumline.pieces.rows import Spread, cut, piece_name, split_name
from drumline.pieces.stored import Stored, merged

SPREADS = st.tuples(st.integers(1, 4), st.integers(1, 5)).map(
    lambda size: Spread(tuple(tuple(range(share, size[0] * size[1], size[1])) for share in range(size[1])))
)
"""Of so many groups of so many ranks."""


class Tensor(torch.Tensor):
    """A tensor that says how it is spread, without ranks."""

    spread: Spread | None = None


def tensor(length: int, width: int, spread: Spread | None) -> Tensor:
    made = torch.arange(length * width, dtype=torch.float32).reshape(length, width).as_subclass(Tensor)
    made.spread = spread
    return made


@pytest.fixture(autouse=True, scope="module")
def told_by_the_tensor() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "spread_of", lambda tensor: tensor.spread)
        yield


def size_of(spread: Spread) -> int:
    return sum(len(ranks) for ranks in spread.holders)


@settings(max_examples=200, deadline=None)
@given(spread=SPREADS, lengths=st.lists(st.integers(0, 13), min_size=1, max_size=6), data=st.data())
def test_every_row_is_written_exactly_once_by_a_rank_that_has_it(
    spread: Spread, lengths: list[int], data: st.DataObject
) -> None:
    size = size_of(spread)
    tensors = {
        f"t{at}": tensor(length, 3, spread if length and data.draw(st.booleans()) else None)
        for at, length in enumerate(lengths)
    }
    writers = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    lost = without_writer([each.spread for each in tensors.values()], writers)
    written: Counter[tuple[str, int]] = Counter()
    for rank in range(size):
        for piece in own_pieces(tensors, rank, writers):
            assert rank in writers
            name, rows = split_name(piece)
            start, stop, length = rows or (0, lengths[int(name[1:])], lengths[int(name[1:])])
            assert length == lengths[int(name[1:])]
            own = tensors[name].spread
            if own is not None:
                assert own.rows(length, rank) == (start, stop)
            written.update((name, row) for row in range(start, stop))
    assert set(written.values()) <= {1}
    for name, each in tensors.items():
        for row in range(len(each)):
            holders = [r for r in range(size) if each.spread is None or _has(each.spread, len(each), r, row)]
            assert ((name, row) in written) == (not set(holders) <= set(lost))


def _has(spread: Spread, length: int, rank: int, row: int) -> bool:
    start, stop = spread.rows(length, rank)
    return start <= row < stop


@settings(max_examples=200, deadline=None)
@given(before=SPREADS, after=SPREADS, length=st.integers(0, 17), data=st.data())
def test_each_reader_gets_exactly_its_rows_wherever_they_lie(
    before: Spread, after: Spread, length: int, data: st.DataObject
) -> None:
    size = size_of(after)
    needs = [after.rows(length, rank) for rank in range(size)]
    pieces = [cut(length, share, len(before.holders)) for share in range(len(before.holders))]
    here = [
        {"t": merged(data.draw(st.lists(st.sampled_from(pieces))))} if data.draw(st.booleans()) else {}
        for _ in range(size)
    ]
    everywhere = {row for there in here for start, stop in there.get("t", ()) for row in range(start, stop)}
    wanted = {row for start, stop in needs for row in range(start, stop)}
    if not wanted <= everywhere:
        with pytest.raises(ValueError, match="is missing"):
            list(transfers({"t": needs}, here))
        return
    received: list[Counter[int]] = [Counter() for _ in range(size)]
    for rank, (start, stop) in enumerate(needs):
        own = {row for first, last in here[rank].get("t", ()) for row in range(first, last)}
        received[rank].update(own & set(range(start, stop)))
    for each in transfers({"t": needs}, here):
        rows = range(each.start, each.stop)
        assert rows and each.source != each.target
        assert all(any(a <= row < b for a, b in here[each.source]["t"]) for row in rows)
        received[each.target].update(rows)
    assert received == [Counter(range(start, stop)) for start, stop in needs]


@given(length=st.integers(0, 20), shares=st.integers(1, 8))
def test_rows_are_cut_as_torch_cuts_them(length: int, shares: int) -> None:
    chunks = torch.arange(length).chunk(shares) if length else ()
    own = [list(range(*cut(length, share, shares))) for share in range(shares)]
    assert [rows for rows in own if rows] == [chunk.tolist() for chunk in chunks if len(chunk)]
    assert [row for rows in own for row in rows] == list(range(length))


@given(length=st.integers(1, 9), ends=st.sets(st.integers(1, 8)), start=st.integers(0, 8), stop=st.integers(0, 9))
def test_rows_are_read_across_pieces(length: int, ends: set[int], start: int, stop: int) -> None:
    whole = torch.arange(length * 2).reshape(length, 2)
    edges = [0, *sorted(end for end in ends if end < length), length]
    pieces = {piece_name("t", a, b, length): whole[a:b] for a, b in pairwise(edges)}
    stored = Stored.in_memory(pieces)
    stored.check_whole()
    assert torch.equal(stored.read("t"), whole)
    start, stop = min(start, length), min(stop, length)
    if start <= stop:
        into = torch.full((stop - start, 2), -1)
        stored.fill("t", into, start)
        assert torch.equal(into, whole[start:stop])


def test_pieces_that_are_missing_there_twice_or_of_another_tensor_are_named() -> None:
    rows = torch.arange(8.0).reshape(4, 2)
    for pieces, what in (
        ({"t@0:2:4": rows[:2]}, "row 2 of t is missing"),
        ({"t@2:4:4": rows[2:]}, "row 0 of t is missing"),
        ({"t@0:3:4": rows[:3], "t@2:4:4": rows[2:]}, "row 2 of t is there twice"),
        ({"t@0:2:4": rows[:2], "t@2:4:5": rows[2:]}, "not of the same tensor"),
        ({"t@0:3:4": rows[:2]}, "has the shape"),
        ({"t@0:1:4": torch.tensor(1.0)}, "has the shape"),
    ):
        with pytest.raises(ValueError, match=what):
            Stored.in_memory(pieces).check_whole()
