"""The checksums of a GPU: one or two bits with another value, or a piece of another step, never go unnoticed."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.snapshots import sums as module
from drumline.snapshots.sums import sums

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 1024)


def data(seed: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_they_are_the_sums_of_each_pieces_words_and_of_their_products_with_their_positions() -> None:
    given_data = data(0, 5 * 1024 + 256)
    words = given_data.view(torch.int32).tolist()
    pieces = [words[start : start + 256] for start in range(0, len(words), 256)]
    expected = [[sum(piece), sum(word * place for place, word in enumerate(piece, 1))] for piece in pieces]
    assert sums(given_data, CPU).tolist() == expected
    assert sums(given_data[:0], CPU).tolist() == []


@given(st.integers(0, 2**32), st.integers(1, 2))
def test_one_or_two_bits_that_have_another_value_change_them(seed: int, bits: int) -> None:
    draw = random.Random(seed)
    before = data(seed % 7, 3 * 1024)
    after = before.clone()
    for place in draw.sample(range(len(before) * 8), bits):
        after[place // 8] ^= 1 << place % 8
    assert not torch.equal(sums(before, CPU), sums(after, CPU))


@given(st.integers(0, 2**32))
def test_a_part_of_another_step_changes_them(seed: int) -> None:
    draw = random.Random(seed)
    before, other = data(1, 4 * 1024), data(2, 4 * 1024)
    start = draw.randrange(0, 4 * 1024 - 8)
    end = draw.randrange(start + 8, 4 * 1024 + 1)
    mixed = torch.cat((before[:start], other[start:end], before[end:]))
    assert not torch.equal(sums(before, CPU), sums(mixed, CPU))
