"""What `train --dry_run` says about the room for copies of the state: the same as the run will find."""

from dataclasses import replace

import pytest

from drumline.bench.copies import State, in_shared_memory, on_gpu
from drumline.cli.app import run_command

GB, SPARED = 10**9, 2 << 30


def state(*, ranks: int = 1, hosts: int = 1, snapshots: bool = True) -> State:
    return State(bytes=12 * GB, ranks_per_host=ranks, hosts=hosts, snapshots=snapshots)


@pytest.mark.parametrize(
    ("ranks", "hosts", "snapshots", "copied_gb"),
    [
        (1, 1, True, 12),
        (4, 1, True, 3),  # a rank's share of snapshots is what it writes of a checkpoint, too
        (4, 2, True, 3 + 1.5),  # each host has a whole snapshot; all ranks share a checkpoint
        (4, 2, False, 1.5),
    ],
)
def test_a_rank_copies_its_share_of_snapshots_and_saves(
    ranks: int, hosts: int, snapshots: bool, copied_gb: float
) -> None:
    assert state(ranks=ranks, hosts=hosts, snapshots=snapshots).on_gpu_bytes == copied_gb * GB


@pytest.mark.parametrize(
    ("sharing", "ranks", "hosts", "copies", "of_host_gb", "on_gpu_gb"),
    [
        (4, 4, 1, 2, 12, 3),  # a host alone has nobody to send copies to
        (8, 4, 2, 1, 6, 1.5),
        (8, 4, 2, 2, 12, 1.5),
        (16, 4, 4, 2, 6, 0.75),
        (4, 4, 2, 2, 12, 3),  # each host has all of it
        (8, 4, 4, 2, 6, 1.5),  # another group of ranks has the same
    ],
)
def test_a_host_keeps_the_rows_of_its_ranks_and_copies_of_others_if_no_one_else_has_them(
    sharing: int, ranks: int, hosts: int, copies: int, of_host_gb: float, on_gpu_gb: float
) -> None:
    own = replace(state(ranks=ranks, hosts=hosts), sharing=sharing, copies=copies)
    assert (own.of_host_bytes, own.on_gpu_bytes) == (of_host_gb * GB, on_gpu_gb * GB)


def test_with_room_on_the_gpu_training_waits_for_milliseconds_and_else_for_pcie() -> None:
    assert on_gpu(state(), free_bytes=12 * GB + SPARED) == (
        "12.00 GB more on each GPU, so that saves and snapshots hold up training for milliseconds"
    )
    crowded = on_gpu(state(), free_bytes=12 * GB + SPARED - 1)
    assert crowded.startswith("none on the GPU, where 14.15 GB are left for 12.00 GB and some to spare: ")
    assert "saves and snapshots hold up training for about 0.48 s each (over PCIe); a smaller --batch_size" in crowded
    assert "where 0.00 GB are left" in on_gpu(state(), free_bytes=-GB)
    assert "saves hold up training" in on_gpu(state(snapshots=False), free_bytes=0)


def test_snapshots_take_two_slots_of_the_whole_state_on_each_host() -> None:
    assert in_shared_memory(state(ranks=4), free_bytes=24 * GB) == (
        "24.00 GB of /dev/shm on each host, where 24.00 GB are free"
    )
    none = in_shared_memory(state(ranks=4), free_bytes=24 * GB - 10**7)
    assert none.startswith("none: they take 24.00 GB of /dev/shm, where 23.99 GB are free (a container needs a larger")


def test_a_dry_run_says_how_much_shared_memory_the_snapshots_of_its_ranks_will_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--device", "cpu", "--nproc", "2", "--gradient_accumulation_steps", "2"]
    assert run_command(["train", "--dry_run", *flags]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("snapshots  "))
    assert "GB of /dev/shm" in line
    assert run_command(["train", "--dry_run", *flags, "--snapshot_every", "0"]) == 0
    assert "snapshots  " not in capsys.readouterr().err
