"""Summing gradients: the fixed tree gives the same bits however its leaves are dealt out."""

import pytest
import torch
from helpers.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from drumline.data.batches import BatchPlan
from drumline.parallel.bitwise import Bitwise, SumTree, _blocks, _span, summed
from drumline.parallel.strategies import Plain, Strategy, make_strategy
from drumline.parallel.world import Place, World, join, leave


@given(leaves=st.integers(1, 40), world_size=st.integers(1, 12), seed=st.integers(0, 1000))
def test_the_tree_gives_the_same_bits_for_any_number_of_ranks(leaves: int, world_size: int, seed: int) -> None:
    world_size = min(leaves, world_size)
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(5, generator=generator) * 10.0**power for power in torch.randint(-9, 9, (leaves,)).tolist()]
    whole = summed({(index, 1): value for index, value in enumerate(values)})
    plan = BatchPlan(1, leaves)
    blocks: dict[tuple[int, int], Tensor] = {}
    for rank in range(world_size):
        tree, share = SumTree(), plan.share(rank, world_size)
        for index in share:
            tree.add((index, 1), values[index])
        assert list(tree.blocks) == [_span(block) for block in _blocks(share)]  # what the exchange relies on
        blocks |= tree.blocks
    assert torch.equal(summed(blocks), whole)


def test_the_order_of_a_sum_matters_which_is_why_there_is_a_tree() -> None:
    values = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8]), torch.tensor([1.0])]
    assert not torch.equal(
        summed(dict(zip(((i, 1) for i in range(4)), values, strict=True))), torch.stack(values).sum(0)
    )


class Doubled(nn.Module):
    """Has a parameter that some micro-batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.used * x).sum() + (self.sometimes.sum() if x[0] > 2 else 0.0)


def whole_step(strategy: Strategy, batches: list[Tensor], *, vote: bool) -> list[float]:
    """The loss of a step and how many ranks voted, with the gradients in place."""
    for number, batch in enumerate(batches):
        with strategy.micro_batch(number):
            loss = strategy.model(batch).sum()
            loss.backward()
        strategy.add(loss.detach())
    return strategy.finish(torch.tensor([float(vote)])).tolist()


def test_bitwise_on_one_rank_is_the_plain_sum_up_to_rounding() -> None:
    batches = [torch.full((3,), float(n)) for n in range(1, 6)]
    results = []
    for kind in ("plain", "bitwise"):
        model = Doubled()
        world, plan = World(Place(), torch.device("cpu")), BatchPlan(1, 5)
        strategy = make_strategy(model, plan, world, bitwise=kind == "bitwise")
        assert isinstance(strategy, Bitwise if kind == "bitwise" else Plain)
        totals = whole_step(strategy, batches, vote=True)
        results.append([*totals, *(p.grad.tolist() for p in model.parameters() if p.grad is not None)])
    assert results[0] == results[1]
    assert results[0][1] == 1.0  # the vote


def _vote(bitwise: bool, votes: tuple[bool, ...]) -> list[float]:
    world = join(device="cpu")
    try:
        model = nn.Linear(2, 1)
        strategy = make_strategy(model, BatchPlan(1, 3), world, bitwise=bitwise)
        share = BatchPlan(1, 3).share(world.rank, world.size)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return whole_step(strategy, [torch.ones(2) / 2 for _ in share], vote=votes[world.rank])
    finally:
        leave()


@pytest.mark.parametrize("bitwise", [False, True])
def test_every_rank_learns_of_one_ranks_wish_to_stop_with_the_loss(bitwise: bool) -> None:
    for votes, expected in (((False, True), 1.0), ((False, False), 0.0)):
        outcomes = run_ranks(_vote, [(bitwise, votes)] * 2)
        assert [outcome.value for outcome in outcomes] == [[3.0, expected]] * 2
