"""Snapshots of state that is spread over ranks and hosts: read by any sharding, and what a lost host costs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.saved import saver_of, state
from helpers.sharded import (
    HSDP,
    PLAIN,
    THREE,
    TWO,
    joined,
    made,
    on_ranks,
    resumed,
)
from torch.distributed.device_mesh import DeviceMesh

from drumline.checkpoint import resuming, trouble
from drumline.checkpoint.resuming import find_snapshots
from drumline.checkpoint.state import tensors_of
from drumline.errors import CheckpointError, ConfigError
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import World, join
from drumline.sharding.mesh import make_mesh, size_of_groups
from drumline.snapshots.slots import empty_slot, read_header


def hosted(
    sharding: tuple[int, int], memories: list[Path], run: Path, *, copies: int = 1
) -> tuple[World, DeviceMesh | None, Any]:
    """memories: of the host of each rank"""
    world, mesh = joined(sharding)
    resuming.MEMORY = memories[world.rank]
    same_host = [rank for rank, each in enumerate(memories) if each == memories[world.rank]]
    os.environ["LOCAL_WORLD_SIZE"] = str(len(same_host))
    own = replace(world, place=replace(world.place, local_rank=same_host.index(world.rank)))
    return own, mesh, find_snapshots(RunFolder(run), own, takes=True, copies=copies)


def keeps(sharding: tuple[int, int], memories: list[Path], run: Path, *steps: int, copies: int = 1) -> list[str]:
    """A checkpoint of step 2, and a snapshot of each of these; gives what was said."""
    world, mesh, snapshots = hosted(sharding, memories, run, copies=copies)
    said: list[str] = []
    for step in (2, *steps):
        saver = saver_of(
            RunFolder(run),
            world=world,
            of=made(step, mesh),
            snapshots=snapshots,
            tell=lambda message, event: said.append(message),
        )
        saver.poll()
        assert saver._memory is not None and saver._memory._taker is not None
        saver._memory._taker.wait()
        saver.save(state(step), on_disk=step == 2, in_memory=step > 2)
        saver._memory._taker.wait()
        saver.wait()
        saver._memory._taker._give_back()
        world.gather(None)
    return said


def keeps_copies(sharding: tuple[int, int], memories: list[Path], run: Path, *steps: int) -> list[str]:
    return keeps(sharding, memories, run, *steps, copies=2)


def goes_on_from_memory(sharding: tuple[int, int], memories: list[Path], run: Path) -> list[Any]:
    world, mesh, snapshots = hosted(sharding, memories, run)
    return [*resumed(world, mesh, run, snapshots=snapshots)]


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    (tmp_path / "run").mkdir()
    memories = [tmp_path / "memory-0", tmp_path / "memory-1"]
    for path in memories:
        path.mkdir()
    return memories


def from_memory(sharding: tuple[int, int], memories: list[Path], run: Path) -> tuple[list[Any], list[str]]:
    """Where all ranks went on, and what rank 0 said."""
    outcomes = on_ranks(goes_on_from_memory, sharding, memories, run)
    (where,) = {(outcome.value[0], outcome.value[1]) for outcome in outcomes}
    return [*where], outcomes[0].value[2]


def test_shards_in_memory_are_read_by_any_number_of_ranks_on_that_host(tmp_path: Path, hosts: list[Path]) -> None:
    run, host = tmp_path / "run", hosts[0]
    (said, *_) = [outcome.value for outcome in on_ranks(keeps, THREE, [host] * 3, run, 5)]
    assert not any(said)
    for sharding in (TWO, THREE, HSDP, PLAIN):
        where, said = from_memory(sharding, [host] * 4, run)
        assert where == [5, True], said


def test_shards_are_collected_from_the_hosts_where_they_lie(tmp_path: Path, hosts: list[Path]) -> None:
    run, (one, other) = tmp_path / "run", hosts
    said = on_ranks(keeps, (1, 4), [one, one, other, other], run, 5)[0].value
    assert next(filter(None, said)).startswith("note: each shard is in the memory of one host")
    for sharding, memories in (
        ((1, 4), [one, one, other, other]),
        (THREE, [one, other, other]),
        (HSDP, [other, one] * 2),
    ):
        where, said = from_memory(sharding, memories, run)
        assert where == [5, True] and said == ["resuming from the memory of 2 hosts (step 5)"]


def test_a_lost_host_goes_back_to_the_disk_and_says_so(tmp_path: Path, hosts: list[Path]) -> None:
    run, (one, other) = tmp_path / "run", hosts
    on_ranks(keeps, TWO, [one, other], run, 5)
    for sharding in (TWO, PLAIN):
        where, said = from_memory(sharding, [one] * 2, run)
        assert where == [2, True] and "the snapshot of step 5 " in said[0] and "is missing" in said[0], said


def test_a_lost_host_costs_nothing_if_another_group_has_the_same_shards(tmp_path: Path, hosts: list[Path]) -> None:
    run, (one, other) = tmp_path / "run", hosts
    said = on_ranks(keeps, HSDP, [one, one, other, other], run, 5)[0].value
    assert not any(said)
    for lost in hosts:
        left = other if lost is one else one
        where, said = from_memory(TWO, [left] * 2, run)
        assert where == [5, True], said


@pytest.mark.parametrize(("size", "places"), [(2, [0, 1]), (4, [0, 0, 1, 1]), (4, [0, 1, 2, 0]), (5, [0, 0, 0, 1, 2])])
def test_a_lost_host_costs_nothing_if_each_shard_has_a_copy_on_another(
    tmp_path: Path, hosts: list[Path], size: int, places: list[int]
) -> None:
    run, memories = tmp_path / "run", [*hosts, tmp_path / "memory-2"]
    memories[2].mkdir()
    said = on_ranks(keeps_copies, (1, size), [memories[place] for place in places], run, 4, 5, 6)[0].value
    assert not any(said)
    for lost in set(places):
        left = [memories[place] for place in sorted(set(places) - {lost})]
        where, said = from_memory((1, len(left)), left, run)
        assert where == [6, True], said


def test_a_copy_on_another_host_that_is_damaged_is_not_used(tmp_path: Path, hosts: list[Path]) -> None:
    run, (one, _) = tmp_path / "run", hosts
    on_ranks(keeps_copies, TWO, hosts, run, 5, 6)
    (copy,) = [path for path in one.glob("*/*/1-of-2-*") if (header := read_header(path)) and header.step == 6]
    content = bytearray(copy.read_bytes())
    content[4096 + 5] ^= 1
    copy.write_bytes(content)
    where, said = from_memory(PLAIN, [one], run)
    assert where == [5, True] and "is damaged: its data do not match" in said[0]


def one_has_no_room(sharding: tuple[int, int], memories: list[Path], run: Path) -> list[list[Any]]:
    """The events of two snapshots, for the first of which the second rank has no memory."""
    world, mesh, snapshots = hosted(sharding, memories, run, copies=2)
    events: list[list[Any]] = []
    saver = saver_of(
        RunFolder(run),
        world=world,
        of=made(6, mesh),
        snapshots=snapshots,
        tell=lambda message, event: events.append([event["event"], event.get("step")]),
    )
    assert saver._memory is not None and saver._memory._taker is not None
    for step in (5, 6):
        if step == 6 or world.rank == 0:
            saver.poll()
            saver._memory._taker.wait()
        saver.save(state(step), on_disk=False, in_memory=True)
        saver._memory._taker.wait()
        saver.poll()
        world.gather(None)
    return events


def test_a_rank_without_a_snapshot_holds_up_no_copies(tmp_path: Path, hosts: list[Path]) -> None:
    run = tmp_path / "run"
    outcomes = on_ranks(one_has_no_room, TWO, hosts, run)
    assert [outcome.value for outcome in outcomes] == [[["snapshot", 5], ["snapshot", 6]], [["snapshot", 6]]]
    for left in hosts:
        where, said = from_memory(TWO, [left] * 2, run)
        assert where == [6, True], said


@pytest.mark.parametrize("harm", ["flipped", "torn"])
def test_shards_in_memory_that_are_torn_or_flipped_are_not_used(tmp_path: Path, hosts: list[Path], harm: str) -> None:
    run, host = tmp_path / "run", hosts[0]
    on_ranks(keeps, TWO, [host] * 2, run, 5, 6)
    (slot,) = [path for path in host.glob("*/*/1-of-2-*") if (header := read_header(path)) and header.step == 6]
    content = bytearray(slot.read_bytes())
    if harm == "flipped":
        content[4096 + 5] ^= 1
        slot.write_bytes(content)
    else:
        empty_slot(slot)
    where, said = from_memory(TWO, [host] * 2, run)
    assert where == [5, True]
    assert ("is damaged: its data do not match" in said[0]) == (harm == "flipped")


def groups_of_hosts(sharding: tuple[int, int], memories: list[Path], run: Path, elastic: bool) -> list[Any]:
    world, _, _ = hosted(sharding, memories, run)
    said: list[str] = []
    try:
        mesh = make_mesh(size_of_groups("host", world, elastic=elastic, say=said.append), world)
        return [*mesh.mesh.tolist(), *said]
    except ConfigError as error:
        return [error.problem]


@pytest.mark.parametrize(
    ("places", "groups"),
    [
        ([0, 0, 1, 1], [[0, 1], [2, 3]]),
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        ([0, 1], ["groups of 1 rank share nothing"]),
        (
            [0, 0, 1],
            ["--shard host needs as many ranks on each host, one after the other; the hosts have [[0, 1], [2]]"],
        ),
    ],
)
def test_the_ranks_of_a_host_are_a_group(tmp_path: Path, hosts: list[Path], places: list[int], groups: Any) -> None:
    memories = [hosts[place] for place in places]
    for outcome in on_ranks(groups_of_hosts, (1, len(places)), memories, tmp_path / "run", False):
        assert outcome.value == groups


@pytest.mark.parametrize(
    ("places", "groups"),
    [
        ([0, 0, 1, 1], [[0, 1], [2, 3]]),
        (
            [0, 0, 1],
            [0, 1, 2, "shard  3 ranks cannot be divided as --shard host asks: sharded over all of them for now"],
        ),
    ],
)
def test_where_hosts_come_and_go_those_with_other_numbers_of_ranks_share_one_replica(
    tmp_path: Path, hosts: list[Path], places: list[int], groups: Any
) -> None:
    memories = [hosts[place] for place in places]
    for outcome in on_ranks(groups_of_hosts, (1, len(places)), memories, tmp_path / "run", True):
        assert outcome.value == groups


def one_is_slow(sharding: tuple[int, int], memories: list[Path], run: Path) -> list[Any]:
    """Whether rank 0 would take the next snapshot: before the other rank has completed its share, and after."""
    world, mesh, snapshots = hosted(sharding, memories, run)
    saver = saver_of(RunFolder(run), world=world, of=made(5, mesh), snapshots=snapshots)
    saver.poll()
    assert saver._memory is not None and saver._memory._taker is not None
    saver._memory._taker.wait()
    wants = [saver.wants_snapshot(5)]
    saver.save(state(5), on_disk=False, in_memory=True)
    saver._memory._taker.wait()
    for turn in (0, 1):
        if world.rank == turn:
            saver.poll()
        world.gather(None)
        wants.append(saver.wants_snapshot(6))
        world.gather(None)
    return wants


def test_no_rank_writes_over_a_snapshot_before_all_have_a_newer_one(tmp_path: Path, hosts: list[Path]) -> None:
    outcomes = on_ranks(one_is_slow, TWO, hosts, tmp_path / "run")
    assert [outcome.value for outcome in outcomes] == [[True, False, True], [False] * 3]


def stopped_without_a_disk(sharding: tuple[int, int], memories: list[Path], run: Path, deleted: bool) -> str:
    world, mesh, _ = hosted(sharding, memories, run)
    folder = RunFolder(run)
    model, optimizer = made(7, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trouble, "is_deleted", lambda folder: deleted)
        with pytest.raises(CheckpointError) as raised:
            trouble.end_unsaved(folder, world, tensors_of(model, optimizer), state(7))
    return raised.value.problem


def test_shards_that_cannot_be_saved_at_the_end_are_kept_in_memory(tmp_path: Path, hosts: list[Path]) -> None:
    run = tmp_path / "run"
    problem = on_ranks(stopped_without_a_disk, HSDP, [hosts[0]] * 4, run, False)[0].value
    assert "its state is kept in" in problem
    where, said = from_memory(THREE, [hosts[0]] * 3, run)
    assert where == [7, True], said


def test_shards_of_a_run_whose_folder_is_gone_are_saved_where_it_was(tmp_path: Path, hosts: list[Path]) -> None:
    run = tmp_path / "run"
    problem = on_ranks(stopped_without_a_disk, TWO, [hosts[0]] * 2, run, True)[0].value
    assert f"step 7 is saved in {run}" in problem
    assert resumed(join(device="cpu"), None, Path(problem.rpartition("saved in ")[2]))[:2] == (7, True)
