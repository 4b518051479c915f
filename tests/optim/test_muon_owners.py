"""Muon on several ranks, each matrix orthogonalized by one of them: the bits of one process."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RAISED, run_ranks
from helpers.small import small
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from drumline.elastic.watch import read_pulse
from drumline.files.run_folder import RunFolder
from drumline.optim import muon_owners
from drumline.optim.muon import Muon
from drumline.optim.muon_owners import Price, _Shape, cost, rounds
from drumline.parallel.attempt import Attempt
from drumline.parallel.heartbeat import ATTEMPT, own_pulse
from drumline.parallel.world import join

# Square, tall, wide, odd, fewer rows than ranks; queries, keys and values in one, which no boundary of ranks meets.
SHAPES = [(16, 16), (48, 16), (48, 16), (16, 48), (7, 13), (2, 8), (1, 5), (32, 16), (26, 12), (48, 16), (130, 70)]
ROW_PARTS = {7: [16, 8, 8], 8: [16, 5, 5]}
STEPS = 4
FREE = Price(0.0, 0.0)
State = list[dict[str, Tensor]]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizer_of(weights: list[nn.Parameter]) -> Muon:
    row_parts = {weights[number]: parts for number, parts in ROW_PARTS.items()}
    others = torch.optim.AdamW([{"params": []}])
    return Muon(weights, others, lr=0.02, momentum=0.95, weight_decay=0.1, row_parts=row_parts)


def trained(place: Any = lambda tensor: tensor) -> State:
    """Weights and states after some steps. place: gives each rank its part of a tensor"""
    weights = [nn.Parameter(place(weight)) for weight in gradients(-1)]
    optimizer = optimizer_of(weights)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        for number, (weight, gradient) in enumerate(zip(weights, gradients(step), strict=True)):
            weight.grad = None if (number, step) == (1, 0) else place(gradient)
        optimizer.step()
    return [{"weight": weight.detach(), **optimizer.state[weight]} for weight in weights]


def whole(state: State) -> State:
    return [
        {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in of.items()} for of in state
    ]


def differing(some: State, others: State) -> list[str]:
    return [
        f"{key} of {SHAPES[number]}"
        for number, (one, other) in enumerate(zip(some, others, strict=True))
        for key in one.keys() | other.keys()
        if not torch.equal(one[key], other[key])
    ]


def count_orthogonalizations() -> Counter[str]:
    """Of this process, from now on."""
    counted: Counter[str] = Counter()
    directed = muon_owners.directed

    def counting(ahead: Tensor, *arguments: Any) -> Any:
        counted["matrices"] += len(ahead)
        counted["largest round"] = max(counted["largest round"], ahead.numel())
        return directed(ahead, *arguments)

    muon_owners.directed = counting
    return counted


def on_a_mesh(mesh_shape: Sequence[int], size: int) -> tuple[list[str], list[str], int]:
    """What differs from one process, which states are not sharded as their weights, and the matrices of this rank."""
    muon_owners.ROUND_SIZE, muon_owners.PRICES["cpu"] = size, FREE
    plain = trained()  # no process group yet
    counted = count_orthogonalizations()
    join(device="cpu")
    mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    placements = [Replicate(), Shard(0)][-len(mesh_shape) :]
    state = trained(lambda tensor: distribute_tensor(tensor, mesh, placements))
    astray = [
        key
        for of in state
        for key, each in of.items()
        if key != "updates" and not (isinstance(each, DTensor) and list(each.placements) == placements)
    ]
    return differing(plain, whole(state)), astray, counted["matrices"]


PARTS = len(SHAPES) + sum(len(parts) - 1 for parts in ROW_PARTS.values())


@pytest.mark.parametrize("size", [1 << 26, 800], ids=["one-round", "many-rounds"])
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (2, 2), (2, 1)], ids=str)
def test_sharded_matrices_get_the_bits_of_one_process_and_keep_their_shards(mesh: tuple[int, ...], size: int) -> None:
    ranks = torch.Size(mesh).numel()
    outcomes = run_ranks(on_a_mesh, [(mesh, size)] * ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].err
    assert [outcome.value[:2] for outcome in outcomes] == [([], [])] * ranks
    if ranks > 1:  # every matrix by one rank, but for the one that lacks a gradient in the first step
        assert sum(outcome.value[2] for outcome in outcomes) == PARTS * STEPS - 1
        assert all(outcome.value[2] for outcome in outcomes)


def divided(price: Price) -> tuple[list[str], int]:
    muon_owners.PRICES["cpu"] = price
    plain = trained()
    counted = count_orthogonalizations()
    join(device="cpu")
    return differing(plain, trained()), counted["matrices"]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_have_everything_divide_the_matrices_and_get_the_bits_of_one_process(size: int) -> None:
    outcomes = run_ranks(divided, [(FREE,)] * size)
    assert [outcome.code for outcome in outcomes] == [0] * size, outcomes[0].err
    assert [outcome.value[0] for outcome in outcomes] == [[]] * size
    assert sum(outcome.value[1] for outcome in outcomes) == PARTS * STEPS - 1
    assert all(outcome.value[1] for outcome in outcomes)


@pytest.mark.parametrize("price", [Price(1e12, 0.0), Price(0.0, 1e6)], ids=["messages", "bytes"])
def test_ranks_do_not_divide_what_costs_more_to_exchange(price: Price) -> None:
    assert [outcome.value for outcome in run_ranks(divided, [(price,)] * 2)] == [([], 0)] * 2


def left_alone(sharded: bool) -> None:
    """The last rank crashes while the others need its matrices."""
    muon_owners.PRICES["cpu"] = FREE
    world = join(device="cpu")
    own_pulse().start(world.rank)
    if world.rank == 1:
        muon_owners.directed = None  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    trained((lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])) if sharded else (lambda tensor: tensor))


@pytest.mark.parametrize("sharded", [True, False])
def test_a_rank_says_what_it_waits_in_when_an_owner_is_gone(tmp_path: Path, sharded: bool) -> None:
    outcomes = run_ranks(left_alone, [(sharded,)] * 2, environ={ATTEMPT: str(tmp_path)})
    assert [outcome.code for outcome in outcomes] == [RAISED] * 2
    beat = read_pulse(Attempt(tmp_path), 0)
    assert beat is not None
    what = "rows of matrices and their updates" if sharded else "the updates of matrices that other ranks compute"
    assert beat.waits_for == what


def trained_by_the_command(run: str) -> tuple[int, int]:
    from drumline.cli.app import run_command

    muon_owners.PRICES["cpu"] = FREE
    counted = count_orthogonalizations()
    flags = small("--train_data_path", "text", "--batch_size", "2", "--global_batch_size", "14", "--total_steps", "6")
    return run_command(["train", *flags, "--run_dir", run, "--bitwise"]), counted["matrices"]


def test_ranks_of_a_bitwise_run_divide_the_matrices_and_end_with_the_weights_of_one_process(here: Path) -> None:
    endings = []
    for size in (1, 2, 3):
        outcomes = run_ranks(trained_by_the_command, [(f"w{size}",)] * size)
        assert [outcome.value[0] for outcome in outcomes] == [0] * size, outcomes[0].err
        assert all(outcome.value[1] > 0 for outcome in outcomes) == (size > 1)
        endings.append(RunFolder(here / f"w{size}").read_status()["weights_sha256"])
    assert endings == endings[:1] * 3


SHAPE = st.builds(
    lambda rows, columns, of: _Shape(range(*sorted(n % (rows + 1) for n in of)), rows, columns),
    st.integers(1, 40),
    st.integers(1, 9),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)


@given(shapes=st.lists(SHAPE, min_size=1, max_size=30), owners=st.integers(1, 7), size=st.integers(1, 500))
def test_every_matrix_has_one_owner_who_has_few_at_a_time_and_no_more_work_than_the_others(
    shapes: list[_Shape], owners: int, size: int
) -> None:
    dealt = rounds(tuple(shapes), owners, size)
    assert sorted(chain(*chain(*dealt))) == list(range(len(shapes)))
    for numbers in chain(*dealt):
        elements = [len(shapes[number].rows) * shapes[number].columns for number in numbers]
        assert len(elements) == 1 or sum(elements) <= size
    costs = [cost(len(shape.rows), shape.columns) for shape in shapes]
    loads = [sum(costs[number] for of in dealt for number in of[owner]) for owner in range(owners)]
    assert max(loads) - min(loads) <= max(costs)


@given(shape=SHAPE, shards=st.integers(1, 9))
def test_the_shards_of_a_part_are_all_of_its_rows(shape: _Shape, shards: int) -> None:
    assert sum(shape.on(shard, shards) for shard in range(shards)) == len(shape.rows)
