"""State that is spread over ranks: saved and read by any sharding with the same bits, each rank only its share."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RAISED, run_ranks
from helpers.saved import flipped, saver_of, state
from helpers.sharded import (
    HSDP,
    PLAIN,
    SHARDINGS,
    THREE,
    TWO,
    joined,
    made,
    on_ranks,
    resumed,
    same,
    saves,
    whole,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.checkpoint.export import open_single_file, write_single_file
from drumline.checkpoint.restoring import load, read_weights, resume
from drumline.checkpoint.state import tensors_of
from drumline.errors import CheckpointError
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import join
from drumline.pieces.folders import stored_in
from drumline.pieces.rows import local_part


def reads(sharding: tuple[int, int], runs: list[Path], resume_from: str = "auto") -> list[Any]:
    world, mesh = joined(sharding)
    return [[*resumed(world, mesh, run, resume_from)[:2]] for run in runs]


def test_written_under_any_sharding_and_read_under_any_other_with_the_same_bits(tmp_path: Path) -> None:
    runs = [tmp_path / f"by-{groups}x{ranks}" for groups, ranks in SHARDINGS]
    for sharding, run in zip(SHARDINGS, runs, strict=True):
        on_ranks(saves, sharding, run, 5)
    for sharding in SHARDINGS:
        for outcome in on_ranks(reads, sharding, runs):
            assert outcome.value == [[5, True]] * 4


def test_a_sharded_checkpoint_says_which_rows_a_piece_has_and_each_is_written_once(tmp_path: Path) -> None:
    for sharding in (TWO, HSDP):
        run = tmp_path / str(sharding)
        on_ranks(saves, sharding, run, 5)
        checkpoint = open_checkpoint(RunFolder(run).checkpoint(5))
        stored = stored_in(checkpoint.path)
        pieces = [name for name in stored.names if name.startswith("embedding.weight")]
        assert sorted(pieces) == ["embedding.weight@0:4:7", "embedding.weight@4:7:7"]
        assert sorted(name for name in stored.names if "one.bias" in name)[0] == "exp_avg/one.bias"  # one row: whole
        assert len(stored.names) == len(set(stored.names))
    files = {path.name.split("-")[1] for path in checkpoint.path.glob("*.safetensors")}
    assert len(files) == 4  # under HSDP, replicas divide what they have


def test_a_plain_checkpoint_has_no_pieces(tmp_path: Path) -> None:
    on_ranks(saves, PLAIN, tmp_path / "run", 5)
    assert not [name for name in stored_in(RunFolder(tmp_path / "run").checkpoint(5)).names if "@" in name]


def test_a_file_for_sharing_is_made_of_a_sharded_checkpoint_and_goes_on_sharded(tmp_path: Path) -> None:
    on_ranks(saves, THREE, tmp_path / "run", 5)
    checkpoint = open_checkpoint(RunFolder(tmp_path / "run").checkpoint(5))
    write_single_file(checkpoint, tmp_path / "five.pt")
    single = open_single_file(tmp_path / "five.pt")
    expected = whole(*made(5))
    assert single.tensors is not None and same(single.tensors, expected)
    assert same(read_weights(checkpoint.path), {name: each for name, each in expected.items() if "/" not in name})
    model, optimizer = made(99)
    load(checkpoint, model=model, optimizer=optimizer)
    assert same(whole(model, optimizer), expected)
    for outcome in on_ranks(reads, HSDP, [tmp_path / "new"], str(tmp_path / "five.pt")):
        assert outcome.value == [[5, True]]


def without_disk(sharding: tuple[int, int], runs: list[Path]) -> Any:
    """Each rank has a disk of its own."""
    world, mesh = joined(sharding)
    return [*resumed(world, mesh, runs[world.rank])[:2]]


def test_ranks_that_do_not_see_the_checkpoint_get_their_rows_from_those_that_do(tmp_path: Path) -> None:
    on_ranks(saves, TWO, tmp_path / "run", 5)
    runs = [tmp_path / name for name in ("run", "none", "run", "neither")]
    for outcome in on_ranks(without_disk, HSDP, runs):
        assert outcome.value == [5, True]


def apart(sharding: tuple[int, int], runs: list[Path]) -> None:
    world, mesh = joined(sharding)
    saver_of(RunFolder(runs[world.rank]), world=world, of=made(5, mesh)).close()


def test_shards_that_no_rank_with_the_run_folder_has_are_refused_at_the_start(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("run", "elsewhere")]
    for path in runs:
        path.mkdir()
    outcomes = run_ranks(apart, [(TWO, runs)] * 2)
    assert [outcome.code for outcome in outcomes] == [RAISED] * 2
    assert "rank 1 does not see" in outcomes[0].err and "run, and no rank that does" in outcomes[0].err


def goes_on(sharding: tuple[int, int], run: Path) -> Any:
    world, mesh = joined(sharding)
    return [*resumed(world, mesh, run)]


@pytest.mark.parametrize("sharding", [TWO, HSDP])
def test_a_damaged_piece_is_named_and_all_ranks_use_the_checkpoint_before(
    tmp_path: Path, sharding: tuple[int, int]
) -> None:
    on_ranks(saves, THREE, tmp_path / "run", 5, 6)
    newest = RunFolder(tmp_path / "run").checkpoint(6)
    harmed = newest / "optimizer-00002-of-00003.safetensors"
    harmed.write_bytes(flipped(harmed.read_bytes(), random.Random(1)))
    outcomes = on_ranks(goes_on, sharding, tmp_path / "run")
    assert [outcome.value[:2] for outcome in outcomes] == [[5, True]] * len(outcomes)
    assert f"{harmed.name} does not match its hash" in outcomes[0].value[2][0]
    assert newest.with_name("step-00000006.damaged").exists() and len(checkpoint_paths(newest.parent)) == 1


def test_pieces_of_which_some_are_missing_are_an_error_for_people(tmp_path: Path) -> None:
    on_ranks(saves, TWO, tmp_path / "run", 5)
    path = RunFolder(tmp_path / "run").checkpoint(5)
    for file in path.glob("*-00002-of-00002.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read .*row 4 of .* is missing"):
        stored_in(path)


def killed(sharding: tuple[int, int], run: Path, victim: int, point: str) -> None:
    """Save once, and die in the second save."""
    world, mesh = joined(sharding)
    dead, saved = run.parent / f"dead-{run.name}", False

    def reached(name: str) -> None:
        if saved and world.rank == victim and name == point:
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    for step in (5, 6):
        saver = saver_of(RunFolder(run), world=world, of=made(step, mesh), reached=reached)
        saver.save(state(step))
        while saver._job is not None and not dead.exists():
            saver.poll()
            time.sleep(0.001)
        saved = True
        if step == 5:
            world.gather(None)
    while world.rank == victim or not dead.exists():  # rank 0 may still be completing it
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("victim", "point", "left"),
    [
        (0, "the folder", 5),
        (0, "half of model-00001-of-00002.safetensors", 5),
        (1, "optimizer-00002-of-00002.safetensors", 5),
        (0, "manifest.json", 5),
        (0, "before the rename", 5),
        (0, "after the rename", 6),
    ],
)
def test_a_rank_killed_in_a_save_of_shards_leaves_a_valid_checkpoint(
    tmp_path: Path, victim: int, point: str, left: int
) -> None:
    outcomes = run_ranks(killed, [(TWO, tmp_path / "run", victim, point)] * 2)
    assert outcomes[victim].code == -signal.SIGKILL, outcomes
    step, is_same, said = resumed(join(device="cpu"), None, tmp_path / "run")
    assert (step, is_same) == (left, True) and len(said) == 1


class Peak:
    """The most private memory that this process has while it is watched, beyond what it had; files are not."""

    def __enter__(self) -> "Peak":
        self.bytes, self._since, self._done = 0, _private(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, _private() - self._since)

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def _private() -> int:
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(1024, 1024) for _ in range(24))


def memory_of_a_share(sharding: tuple[int, int], run: Path) -> Any:
    """The peak of a save, and of a resume; the bytes of the whole state, and of this rank's share."""
    world, mesh = joined(sharding)
    model = Large()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = tensors_of(model, optimizer)
    own = sum(local_part(each).nbytes for each in tensors.values())
    world.gather(None)
    with Peak() as saving:
        saver = saver_of(RunFolder(run), world=world, of=(model, optimizer))
        saver.save(state(5))
        saver.wait()
        saver.close()
    world.gather(None)
    del saver
    optimizer.state.clear()
    with Peak() as loading:
        at = resume(
            "auto", RunFolder(run), world, model, optimizer, facts={}, allow_change=(), snapshots=None, say=print
        )
    assert at is not None and at.step == 5
    return [saving.bytes, loading.bytes, sum(each.nbytes for each in tensors.values()), own]


def test_no_rank_ever_has_the_whole_state_in_memory(tmp_path: Path) -> None:
    for outcome in on_ranks(memory_of_a_share, (1, 4), tmp_path / "run"):
        saving, loading, every, own = outcome.value
        assert own < every * 0.26
        assert saving < every * 0.55 and loading < every * 0.55, outcome.value
