"""Which sequences a step takes: pure, complete, in order, whoever computes them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drumline.config.settings import BatchConfig
from drumline.data.batches import BatchPlan, TokenBatches, mix, plan_batches, visit_order, visits
from drumline.data.tokens import TokenFile
from drumline.errors import ConfigError, DataError
from drumline.trainer.samples import DatasetBatches


def token_file(count: int, **more: object) -> TokenFile:
    return TokenFile(path=Path("train.bin"), tokens=np.arange(count, dtype=np.uint16), **more)  # type: ignore[arg-type]


@given(items=st.integers(1, 3000), epoch=st.integers(0, 2**40), seed=st.integers(0, 2**63))
def test_each_epoch_visits_every_item_exactly_once(items: int, epoch: int, seed: int) -> None:
    positions = np.arange(items, dtype=np.int64) + epoch * items
    assert sorted(visit_order(positions, items=items, seed=seed)) == list(range(items))


def test_the_order_differs_from_epoch_to_epoch_and_from_seed_to_seed() -> None:
    first = visit_order(np.arange(500), items=500, seed=1)
    for other in (visit_order(np.arange(500) + 500, items=500, seed=1), visit_order(np.arange(500), items=500, seed=2)):
        assert (first == other).mean() < 0.02
    assert abs(np.corrcoef(first, np.arange(500))[0, 1]) < 0.15  # and is not nearly the identity


@given(
    micro_batch=st.integers(1, 7),
    micro_batches=st.integers(1, 12),
    world_size=st.integers(1, 12),
    step=st.integers(0, 10**6),
    items=st.integers(1, 400),
)
def test_the_shares_of_any_number_of_ranks_are_the_one_rank_batch_in_order(
    micro_batch: int, micro_batches: int, world_size: int, step: int, items: int
) -> None:
    plan = BatchPlan(micro_batch, micro_batches)
    batches = TokenBatches(token_file(items * 3 + 1), plan, context=3, seed=5)
    if world_size > micro_batches:
        with pytest.raises(ConfigError, match=f"{world_size} ranks cannot share a step of {micro_batches}"):
            plan.share(0, world_size)
        return
    shares = [plan.share(rank, world_size) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(micro_batches))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    union = np.concatenate([visits(batches, 5, step, index) for share in shares for index in share])
    assert union.tolist() == visits(batches, 5, step).tolist()


@given(global_batch=st.integers(1, 40), items=st.integers(1, 100), start=st.integers(0, 50))
def test_consecutive_steps_neither_skip_nor_repeat(global_batch: int, items: int, start: int) -> None:
    batches = TokenBatches(token_file(items * 2 + 1), BatchPlan(global_batch, 1), context=2, seed=0)
    steps = range(start, start + 2 * items // global_batch + 2)
    seen = np.concatenate([visits(batches, 0, step) for step in steps])
    stream = np.arange(start * global_batch, (steps[-1] + 1) * global_batch)
    assert seen.tolist() == visit_order(stream, items=items, seed=0).tolist()


def test_step_one_million_needs_no_walk_through_the_steps_before_it() -> None:
    # A billion windows: anything that stored or walked a permutation would not come back.
    plan = BatchPlan(8, 4)
    order = visit_order(np.arange(32) + 10**6 * plan.sequences, items=10**9 + 7, seed=3)
    assert len(set(order.tolist())) == 32 and order.min() >= 0 and order.max() < 10**9 + 7


def test_a_windows_targets_are_its_tokens_moved_on_by_one() -> None:
    batches = TokenBatches(token_file(41), BatchPlan(5, 2), context=8, seed=0)
    assert batches.items == 5
    inputs, targets, documents = batches.micro_batch(0, 1)
    assert inputs.shape == targets.shape == (5, 8) and documents is None
    assert torch.equal(targets, inputs + 1)
    assert {row[0].item() % 8 for row in inputs} == {0}


def test_documents_are_numbered_and_the_end_of_text_belongs_to_the_one_it_ends() -> None:
    tokens = TokenFile(path=Path("t"), tokens=np.array([5, 9, 6, 7, 9, 9, 8, 5], dtype=np.uint16), end_of_text=9)
    batches = TokenBatches(tokens, BatchPlan(1, 1), context=7, seed=0, document_mask=True)
    _, _, documents = batches.micro_batch(0, 0)
    assert documents is not None
    assert documents.tolist() == [[0, 0, 1, 1, 1, 2, 3]]


def test_document_mask_without_an_end_of_text_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="document_mask"):
        TokenBatches(token_file(100), BatchPlan(1, 1), context=8, seed=0, document_mask=True)


def test_too_few_tokens_for_one_sequence_are_refused_with_the_numbers() -> None:
    with pytest.raises(DataError, match="8 tokens, too few for one sequence of 8"):
        TokenBatches(token_file(8), BatchPlan(1, 1), context=8, seed=0)


def test_total_batch_is_batch_size_times_ranks_times_accumulation() -> None:
    batch = BatchConfig(batch_size=8, gradient_accumulation_steps=2)
    assert plan_batches(batch, default_batch_size=1, world_size=4) == BatchPlan(micro_batch_size=8, micro_batches=8)


def test_global_batch_size_sets_the_total_whatever_the_ranks() -> None:
    for world_size in (1, 2, 3):
        plan = plan_batches(BatchConfig(global_batch_size=12), default_batch_size=8, world_size=world_size)
        assert plan == BatchPlan(micro_batch_size=6, micro_batches=2)


@pytest.mark.parametrize(
    "batch",
    [
        {"batch_size": 0},
        {"gradient_accumulation_steps": -1},
        {"global_batch_size": 10, "batch_size": 4},
        {"global_batch_size": 8, "gradient_accumulation_steps": 2},
    ],
)
def test_batch_sizes_that_cannot_work_are_refused_with_a_fix(batch: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_batches(BatchConfig(**batch), default_batch_size=4, world_size=1)
    assert "--" in raised.value.fix


def test_any_map_style_dataset_is_visited_once_an_epoch() -> None:
    data = [(torch.tensor(float(i)), torch.tensor(2.0 * i)) for i in range(10)]
    batches = DatasetBatches(data, BatchPlan(5, 1), seed=1)  # type: ignore[arg-type]
    inputs = torch.cat([batches.micro_batch(step, 0)[0] for step in range(2)])
    assert sorted(inputs.tolist()) == [float(i) for i in range(10)]


def test_mix_gives_different_seeds_for_different_places() -> None:
    seeds = {mix(seed, step, micro) for seed in range(5) for step in range(50) for micro in range(8)}
    assert len(seeds) == 5 * 50 * 8
    assert mix(0, 1) != mix(1, 0)


def test_short_contexts_are_the_same_tokens_in_the_same_order_until_their_last_step() -> None:
    whole, short = (TokenBatches(token_file(101), BatchPlan(3, 2), context=8, seed=0) for _ in range(2))
    short.short_steps = 2
    for step in range(4):
        for expected, actual in zip(whole.micro_batch(step, 1)[:2], short.micro_batch(step, 1)[:2], strict=True):
            assert actual.shape == ((12, 2) if step < 2 else (3, 8)) and actual.shape[1] == short.context_of(step)
            assert torch.equal(actual.flatten(), expected.flatten())


def test_documents_stay_apart_in_short_contexts() -> None:
    short = TokenBatches(token_file(41, end_of_text=3), BatchPlan(2, 1), context=8, seed=0, document_mask=True)
    short.short_steps = 1
    inputs, _, documents = short.micro_batch(0, 0)
    assert documents is not None and documents.shape == inputs.shape == (8, 2)
