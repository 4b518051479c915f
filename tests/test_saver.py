"""Saving while training goes on: killed anywhere, on one rank or two, a run always has a valid checkpoint."""

import json
import multiprocessing.connection
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import _CONTEXT, TIMEOUT_S
from saved import save, saver_of, state
from torch.distributed import FileStore

from drumline import saver as saver_module
from drumline.checkpoints import newest_valid, open_checkpoint, weights
from drumline.cluster import Place, World
from drumline.errors import CheckpointError
from drumline.run_folder import RunFolder

KILLS_ALONE, KILLS_OF_TWO = 160, 40
POINTS_FILE = "points-{}.json"


def world_of(rank: int, size: int, meeting: Path) -> World:
    store = FileStore(str(meeting), size) if size > 1 else None
    return World(Place(rank=rank, size=size, local_rank=rank), torch.device("cpu"), store)


def save_until_killed(folder: RunFolder, rank: int, size: int, meeting: Path, die: tuple[int, str | float]) -> None:
    """Go on from the newest checkpoint, save once, and die in the next save: of rank die[0], at a point or a time."""
    torch.set_num_threads(1)
    world = world_of(rank, size, meeting)
    armed = False

    def reached(point: str) -> None:
        if armed and point == die[1] and rank == die[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    with_saver = saver_of(folder, world=world, reached=reached)
    step = world.on_main(lambda: newest_step(folder))
    while True:
        step += 1
        with_saver.save(state(step))
        with_saver.wait()
        if world.is_main and not armed:
            assert with_saver.saved_step == step
        # Every rank's: a point of the save that follows, not of one that another rank still concludes.
        world.gather(None)
        if not armed and isinstance(die[1], float) and rank == die[0]:
            threading.Timer(die[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        if not armed:
            assert not list(folder.checkpoints.glob(".step-*")), "leftovers"
        world.gather(None)
        armed = True


def newest_step(folder: RunFolder) -> int:
    said: list[str] = []
    found = newest_valid(folder.checkpoints, warn=said.append)
    assert said == []  # a kill damages nothing that has its name
    return found.step if found else 0


def collect_points(folder: RunFolder, rank: int, size: int, meeting: Path, out: Path) -> None:
    points: list[str] = []
    each = saver_of(folder, world=world_of(rank, size, meeting), reached=points.append)
    each.save(state(1))
    each.wait()
    (out / POINTS_FILE.format(rank)).write_text(json.dumps(points))


def start(work: Any, size: int, *arguments: Any) -> list[Any]:
    processes = [_CONTEXT.Process(target=work, args=(arguments[0], rank, size, *arguments[1:])) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def end(processes: list[Any]) -> list[int]:
    """When the first has ended, or all by themselves, kill the others; their exit codes."""
    multiprocessing.connection.wait([process.sentinel for process in processes], TIMEOUT_S)
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


@pytest.mark.parametrize(("size", "kills"), [(1, KILLS_ALONE), (2, KILLS_OF_TWO)])
def test_a_process_killed_anywhere_in_a_save_leaves_a_valid_checkpoint_and_the_next_one_goes_on(
    tmp_path: Path, size: int, kills: int
) -> None:
    for process in start(collect_points, size, RunFolder(tmp_path / "first"), tmp_path / "meet", tmp_path):
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    points = [
        (rank, point) for rank in range(size) for point in json.loads((tmp_path / f"points-{rank}.json").read_text())
    ]
    assert (0, "before the rename") in points and (0, "pruned") in points and len(points) == (10, 15)[size - 1]
    draw, folder = random.Random(0), RunFolder(tmp_path / "run")
    ways: list[tuple[int, str | float]] = [*points, *((draw.randrange(size), draw.uniform(0, 0.05)) for _ in range(8))]
    last = 0
    for number in range(kills):
        codes = end(start(save_until_killed, size, folder, tmp_path / f"meet-{number}", ways[number % len(ways)]))
        assert set(codes) == {-signal.SIGKILL}, (ways[number % len(ways)], codes)
        step = newest_step(folder)
        assert step > last, ways[number % len(ways)]
        last = step
    clean = saver_of(folder)
    clean.save(state(last + 1))
    clean.wait()
    assert newest_step(folder) == last + 1
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == [
        RunFolder.checkpoint_name(step) for step in range(last - 1, last + 2)
    ]


@contextmanager
def telling(folder: RunFolder, **settings: Any) -> Iterator[tuple[saver_module.Saver, list[tuple[str, dict[str, Any]]]]]:
    """A saver, and all that it tells."""
    folder.checkpoints.mkdir(parents=True)
    told: list[tuple[str, dict[str, Any]]] = []
    saver = saver_of(folder, tell=lambda message, event: told.append((message, event)), **settings)
    yield saver, told
    saver.close()


def test_what_is_saved_is_the_state_when_it_was_asked_for_whatever_training_does_meanwhile(tmp_path: Path) -> None:
    folder, may_write = RunFolder(tmp_path / "run"), threading.Event()
    with telling(folder, reached=lambda point: may_write.wait(TIMEOUT_S) and None) as (saver, _):
        before = {name: tensor.clone() for name, tensor in weights(saver._model).items()}
        saver.save(state(1))
        with torch.no_grad():
            for tensor in saver._model.parameters():
                tensor.add_(1)
        may_write.set()
        saver.wait()
        from drumline.checkpoints import load

        load(open_checkpoint(folder.checkpoint(1)), model=saver._model, optimizer=None)
        after = weights(saver._model)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_save_tells_its_bytes_its_stall_and_its_time(tmp_path: Path) -> None:
    with telling(RunFolder(tmp_path / "run")) as (saver, told):
        saver.save(state(4))
        saver.wait()
    ((message, event),) = told
    assert message == "" and event["event"] == "saved" and event["step"] == 4
    assert event["bytes"] > 100 and 0 <= event["stall_s"] and 0 < event["written_s"]


def test_a_save_that_fails_is_told_at_the_next_step_and_the_checkpoint_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    with telling(folder) as (saver, told):
        saver.save(state(10))
        saver.wait()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        saver.save(state(20))
        saver._job.own.exception(TIMEOUT_S)  # type: ignore[union-attr]
        assert len(told) == 1  # nobody is told in the middle of a step
        saver.poll()
        message, event = told[1]
        assert event["event"] == "save failed" and event["step"] == 20 and event["why"] == "No space left on device"
        assert str(folder.checkpoints) in message and "0.4kB needed" in message.replace(_needed(message), "0.4kB")
        assert "The one of step 10 is kept" in message and "tried again in 2 s" in message and "\n" not in message
        assert [p.name for p in folder.checkpoints.iterdir()] == ["step-00000010"]
        assert not saver.wants_to_retry()  # not yet
        monkeypatch.undo()
        saver._retry_at = 0.0
        assert saver.wants_to_retry()
        saver.save(state(21))
        saver.wait()
        assert saver.saved_step == 21 and not saver.wants_to_retry()


def _needed(message: str) -> str:
    return message.split("(")[-1].split(" needed")[0]


def test_a_disk_that_stays_full_for_days_is_tried_at_most_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module.shutil, "disk_usage", lambda path: (1, 1, 0))
    with telling(RunFolder(tmp_path / "run")) as (saver, told):
        monkeypatch.setattr(saver, "_write_part", partial(_refuse, saver))
        saver._failures = 5000
        saver.save(state(1))
        saver.wait()
    assert "tried again in 60 s" in told[-1][0]


def _refuse(saver: saver_module.Saver, *arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_run_that_must_stop_gives_up_after_a_few_tries_and_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_RETRY_S", (0.001, 0.01))
    folder = RunFolder(tmp_path / "run")
    with telling(folder) as (saver, told):
        save(folder, 3)
        monkeypatch.setattr(saver, "_write_part", partial(_refuse, saver))
        with pytest.raises(CheckpointError, match="step 9 could not be saved") as raised:
            saver.finish(state(9), give_up=lambda: True)
    assert "the newest checkpoint is of step 3" in raised.value.fix
    assert [event["event"] for _, event in told] == ["save failed"] * 3


def test_a_run_folder_that_is_gone_is_not_made_anew_where_its_disk_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with telling(folder) as (saver, told):
        folder.path.rename(tmp_path / "away")
        saver.save(state(1))
        saver.wait()
    assert told[0][1]["event"] == "save failed" and not folder.path.exists()


def two_hosts(folder: RunFolder, rank: int, size: int, meeting: Path, elsewhere: Path) -> None:
    """Rank 1's host has a disk of its own where rank 0's has the run."""
    own = folder if rank == 0 else replace(folder, path=elsewhere)
    each = saver_of(own, world=world_of(rank, size, meeting))
    each.save(state(1))
    each.wait()
    each._world.gather(None)


def test_a_rank_that_does_not_see_the_folder_writes_nothing(tmp_path: Path) -> None:
    folder, elsewhere = RunFolder(tmp_path / "run"), tmp_path / "elsewhere"
    for process in start(two_hosts, 2, folder, tmp_path / "meet", elsewhere):
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert open_checkpoint(folder.checkpoint(1)).step == 1 and not elsewhere.exists()
    assert [p.name for p in folder.checkpoint(1).glob("model*")] == ["model-00001-of-00001.safetensors"]


def run_ahead(folder: RunFolder, rank: int, size: int, meeting: Path, ahead: Path) -> None:
    """Rank 0 is slow to conclude its first save; rank 1 has written its part of the second by then."""
    world = world_of(rank, size, meeting)

    def reached(point: str) -> None:
        if rank == 0 and point == "after the rename" and not ahead.exists():
            world.store.wait(["ahead"], timedelta(seconds=TIMEOUT_S))  # type: ignore[union-attr]
            ahead.touch()

    told: list[dict[str, Any]] = []
    each = saver_of(folder, world=world, reached=reached, tell=lambda message, event: told.append(event))
    each.save(state(1))
    if rank == 1:
        each.wait()
    each.save(state(2)) if rank == 1 else None
    if rank == 1:
        each.wait()
        world.store.set("ahead", "1")  # type: ignore[union-attr]
    else:
        each.save(state(2))
        each.wait()
    world.gather(None)
    assert rank == 1 or [event["event"] for event in told] == ["saved", "saved"], told


def test_a_rank_that_is_ahead_keeps_what_it_wrote_of_the_next_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for process in start(run_ahead, 2, folder, tmp_path / "meet", tmp_path / "ahead"):
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert open_checkpoint(folder.checkpoint(2)).step == 2
