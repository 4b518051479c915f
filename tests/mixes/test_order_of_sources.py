"""Which source each sequence of a mix is from: exact, without repetition, and as cheap at any step."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.config.mixes import MixSource, parse_stages
from drumline.data.batches import BatchPlan
from drumline.data.tokens import TokenFile
from drumline.errors import ConfigError
from drumline.mixes.batches import MixBatches, schedule_of
from drumline.mixes.opening import Mix, Source
from drumline.mixes.schedule import BLOCK, Schedule, normalized

weights = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def shares(numbers: list[int]) -> tuple[Fraction, ...]:
    return normalized([Fraction(each) for each in numbers], [f"s{at}" for at in range(len(numbers))])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A schedule with up to three stages, and its number of sources."""
    sources = draw(st.integers(1, 5))
    numbers = st.lists(st.integers(1, 60), min_size=sources, max_size=sources)
    stages, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = at + draw(st.integers(0, 2500))
        at = start + draw(st.integers(1, 2500))
        left_out = draw(st.integers(0, sources - 1)) if sources > 1 else None
        own = [0 if place == left_out else each for place, each in enumerate(draw(numbers))]
        stages.append((start, at, shares(own)))
    return Schedule(shares(draw(numbers)), stages, seed=draw(st.integers(0, 2**63))), sources


@given(numbers=weights, seed=st.integers(0, 2**63), block=st.integers(0, 10**12))
def test_every_block_has_what_the_weights_say_and_all_blocks_together_exactly(
    numbers: list[int], seed: int, block: int
) -> None:
    schedule, exact = Schedule(shares(numbers), [], seed=seed), [share * BLOCK for share in shares(numbers)]
    sources, _ = schedule.at(np.arange(block * BLOCK, (block + 1) * BLOCK))
    counts = np.bincount(sources, minlength=len(numbers)).tolist()
    assert sum(counts) == BLOCK
    for count, wanted, total in zip(counts, exact, schedule.seen((block + 1) * BLOCK), strict=True):
        assert count == wanted if wanted.denominator == 1 else abs(count - wanted) < 2
        assert abs(total - wanted * (block + 1)) <= 1


@settings(max_examples=40)
@given(made=schedules())
def test_the_stream_of_each_source_goes_on_through_blocks_and_stages_without_a_gap(made: tuple[Schedule, int]) -> None:
    schedule, sources = made
    every, numbers = schedule.at(np.arange(9000))
    for source in range(sources):
        own = numbers[every == source]
        assert own.tolist() == list(range(len(own)))
        assert schedule.seen(9000)[source] == len(own)


@given(made=schedules(), position=st.integers(0, 20_000))
def test_what_was_seen_before_a_position_is_known_without_a_walk(made: tuple[Schedule, int], position: int) -> None:
    schedule, sources = made
    every, _ = schedule.at(np.arange(position))
    assert schedule.seen(position) == np.bincount(every, minlength=sources).tolist()


def test_step_one_billion_computes_as_many_blocks_as_step_zero() -> None:
    counts = []
    for start in (0, 10**9 * 512):
        schedule = Schedule(shares([7, 2, 1]), [(100, 10**11, shares([1, 1, 1]))], seed=1)
        schedule.at(np.arange(start, start + 64))
        schedule.seen(start + 64)
        counts.append(schedule._block.cache_info().misses)
    assert counts[1] <= counts[0] + 1 <= 4


def test_another_seed_is_another_order_and_blocks_differ() -> None:
    orders = [Schedule(shares([1, 1]), [], seed=seed).at(np.arange(2 * BLOCK))[0] for seed in (0, 1)]
    assert 0.4 < (orders[0] == orders[1]).mean() < 0.6
    assert 0.4 < (orders[0][:BLOCK] == orders[0][BLOCK:]).mean() < 0.6


def test_a_stage_that_is_added_later_changes_nothing_before_it() -> None:
    plain = Schedule(shares([3, 1]), [], seed=5)
    later = Schedule(shares([3, 1]), [(4321, None, shares([1, 3]))], seed=5)
    for one, two in zip(plain.at(np.arange(4321)), later.at(np.arange(4321)), strict=True):
        assert one.tolist() == two.tolist()
    assert plain.at(np.arange(5000))[0].tolist() != later.at(np.arange(5000))[0].tolist()


def mixed(*tokens: int) -> Mix:
    """Sources whose every token tells its source and its place."""
    sources = []
    for number, count in enumerate(tokens):
        file = TokenFile(
            Path(f"s{number}.bin"), np.arange(count, dtype=np.uint32) + number * 10_000, sha256=str(number)
        )
        sources.append(Source(MixSource(f"s{number}", f"s{number}", "weight", Fraction(number + 1)), file, None))
    return Mix(tuple(sources), ())


def test_no_window_comes_twice_before_all_of_its_source_were_seen_once() -> None:
    batches = MixBatches(mixed(801, 402, 77), BatchPlan(3, 5), context=8, seed=2, total_steps=100)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step in range(60):
        for source, window in map(batches.located, batches.windows(step)):
            seen[source].append(window)
    for source, windows in seen.items():
        items = batches.windows_of[source]
        for at in range(0, len(windows) - items, items):
            assert sorted(windows[at : at + items]) == list(range(items))
        assert len(windows) > items


@given(size=st.integers(1, 6), micro_batches=st.integers(1, 8), ranks=st.integers(1, 8), step=st.integers(0, 10**9))
def test_the_sequences_of_a_step_do_not_depend_on_ranks_or_micro_batches(
    size: int, micro_batches: int, ranks: int, step: int
) -> None:
    mix, plan = mixed(801, 402), BatchPlan(size, micro_batches)
    whole = MixBatches(mix, BatchPlan(size * micro_batches, 1), context=8, seed=2, total_steps=9)
    split = MixBatches(mix, plan, context=8, seed=2, total_steps=9)
    shared = [plan.share(rank, min(ranks, micro_batches)) for rank in range(min(ranks, micro_batches))]
    rows = [row for share in shared for index in share for row in split.micro_batch(step, index)[0].tolist()]
    assert rows == whole.micro_batch(step, 0)[0].tolist()
    assert [row[0] for row in rows] == [
        10_000 * source + 8 * window for source, window in map(split.located, split.windows(step))
    ]


def test_short_contexts_have_the_same_tokens_and_the_source_of_each_part() -> None:
    batches = MixBatches(mixed(801, 402), BatchPlan(4, 1), context=8, seed=2, total_steps=9)
    whole = batches.micro_batch(3, 0)
    batches.short_steps, batches.with_sources = 5, True
    inputs, targets, documents, sources = batches.micro_batch(3, 0)
    assert inputs.shape == (16, 2) and documents is None
    assert inputs.reshape(4, 8).equal(whole[0]) and targets.reshape(4, 8).equal(whole[1])
    assert sources.tolist() == [int(row[0]) // 10_000 for row in inputs.tolist()]


def amounts(*sources: tuple[str, str, int], total_steps: int, stages: tuple[str, ...] = ()) -> Schedule:
    abouts = [MixSource(name, name, kind, Fraction(value)) for name, kind, value in sources]  # type: ignore[arg-type]
    names = [name for name, _, _ in sources]
    return schedule_of(
        abouts, parse_stages(stages, names), [100, 1000], context=10, sequences=10, total_steps=total_steps, seed=0
    )


def test_epochs_and_tokens_are_what_a_run_of_that_length_has() -> None:
    whole = amounts(("a", "epochs", 4), ("b", "tokens", 16_000), total_steps=200)
    assert whole.seen(2000) == [400, 1600]


def test_weights_share_what_epochs_leave_of_the_run() -> None:
    assert amounts(("a", "epochs", 2), ("b", "weight", 5), total_steps=100).seen(1000) == [200, 800]
    with pytest.raises(ConfigError, match="nothing is left"):
        amounts(("a", "epochs", 10), ("b", "weight", 5), total_steps=100)


def test_stages_begin_and_end_at_their_steps_or_fractions_of_the_run() -> None:
    stages = ("10-20 a:1", "50%- b:1")
    schedule = amounts(("a", "weight", 1), ("b", "weight", 1), total_steps=100, stages=stages)
    assert [each.start for each in schedule.stretches] == [0, 100, 200, 500]
    assert set(schedule.at(np.arange(100, 200))[0]) == {0} and set(schedule.at(np.arange(500, 3000))[0]) == {1}
    assert set(schedule.at(np.arange(99))[0]) == set(schedule.at(np.arange(200, 500))[0]) == {0, 1}
    with pytest.raises(ConfigError, match="overlaps"):
        amounts(("a", "weight", 1), ("b", "weight", 1), total_steps=100, stages=("10-60 a:1", "50%- b:1"))


def test_a_weight_that_blocks_have_no_place_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"s1 would be 0\.000999 of the mix, less than one of 1,000 sequences"):
        shares([1000, 1])
    assert shares([999, 1])[1] * BLOCK == 1
