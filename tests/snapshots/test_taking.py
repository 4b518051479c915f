"""A rank's part in the snapshots of its host: never over the newest complete one, off while there is no room."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from helpers.saved import saver_of, state

from drumline.checkpoint import resuming
from drumline.checkpoint.in_memory import own_part
from drumline.checkpoint.saver import Saver
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import Place, World
from drumline.snapshots import folder, taking
from drumline.snapshots.folder import Snapshots
from drumline.snapshots.schedule import Schedule

CPU = torch.device("cpu")
Events = list[dict[str, Any]]


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Snapshots:
    """In a folder in the place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(resuming, "MEMORY", tmp_path / "shm")
    return Snapshots(resuming.snapshot_folder("run"), tmp_path)


@pytest.fixture
def taker(tmp_path: Path, snapshots: Snapshots) -> Iterator[tuple[Saver, Events]]:
    events: Events = []
    saver = saver_of(RunFolder(tmp_path / "run"), tell=lambda message, event: events.append(event), snapshots=snapshots)
    yield saver, events
    saver.close()


def memory_of(saver: Saver) -> taking.Taker:
    assert saver._memory is not None and saver._memory._taker is not None
    return saver._memory._taker


def take(saver: Saver, step: int) -> None:
    """A snapshot of a step, complete."""
    saver.poll()
    memory_of(saver).wait()
    if saver.wants_snapshot(step):
        saver.save(state(step), on_disk=False, in_memory=True)
    memory_of(saver).wait()
    saver.poll()


def test_two_slots_are_written_in_turn_and_the_times_of_each_snapshot_are_reported(
    taker: tuple[Saver, Events], snapshots: Snapshots
) -> None:
    saver, events = taker
    kept = []
    for step in range(1, 6):
        take(saver, step)
        kept.append([found.step for found in snapshots.complete()])
    assert kept == [[1], [2, 1], [3, 2], [4, 3], [5, 4]]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5]
    assert events[0].keys() == {"event", "step", "bytes", "stall_s", "copy_s", "check_s", "complete_s"}
    saver.forget_snapshots()
    assert not snapshots.folder.exists()
    take(saver, 6)
    assert [found.step for found in snapshots.complete()] == [6]


def test_snapshots_that_are_late_are_told_once_though_ranks_start_again(
    snapshots: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Schedule, "complaint", lambda self: "warning: late")
    said = []
    for _ in range(2):
        run = RunFolder(tmp_path / "run")
        saver = saver_of(run, tell=lambda message, event: said.append(message), snapshots=snapshots)
        take(saver, len(said) + 1)
        saver.close()
        for slot in memory_of(saver)._slots:
            slot.close()  # as when its process dies
    assert said == ["warning: late", ""]
    snapshots.clear()
    assert not snapshots.folder.exists()


def test_what_another_attempt_left_is_not_written_over_before_there_is_something_newer(
    taker: tuple[Saver, Events], snapshots: Snapshots, tmp_path: Path
) -> None:
    saver, _ = taker
    for step in (1, 2):
        take(saver, step)
    saver.close()
    for slot in memory_of(saver)._slots:
        slot.close()  # as when its process dies
    again = saver_of(RunFolder(tmp_path / "run"), snapshots=snapshots)
    again.poll()
    memory_of(again).wait()
    slot = memory_of(again)._slot_to_write()
    slot.open()
    assert [found.step for found in snapshots.complete()] == [2]
    again.close()


def test_two_launchers_of_a_run_on_one_machine_keep_one_snapshot(
    taker: tuple[Saver, Events], snapshots: Snapshots, tmp_path: Path
) -> None:
    saver, _ = taker
    take(saver, 1)
    said: Events = []
    other = saver_of(RunFolder(tmp_path / "run"), tell=lambda message, event: said.append(event), snapshots=snapshots)
    take(other, 2)  # does nothing: the first one does it
    assert [found.step for found in snapshots.complete()] == [1] and said == []
    other.close()


@pytest.mark.parametrize("scarce", ["shm", "memory", "container"])
def test_snapshots_are_off_while_there_is_no_room_and_that_is_said_once(
    taker: tuple[Saver, Events], snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    saver, events = taker
    free_bytes = {"shm": 1 << 40, "memory": 1 << 40, "container": 1 << 40}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes["shm"]))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_bytes["memory"]))
    monkeypatch.setattr(folder, "room_in_container", lambda: free_bytes["container"])
    monkeypatch.setattr(taking, "_RETRY_S", 0.0)
    free_bytes[scarce] = 100
    for step in (1, 2):
        take(saver, step)
    assert snapshots.complete() == [] and [event["event"] for event in events] == ["snapshots off"]
    assert "they need" in events[0]["why"] and "of memory in" in events[0]["why"]
    free_bytes[scarce] = 1 << 40
    take(saver, 3)
    take(saver, 4)
    assert [found.step for found in snapshots.complete()][:1] == [4]


@pytest.mark.needs("disks")
def test_a_full_shared_memory_ends_no_run_and_leaves_nothing_there(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Snapshots, "no_room", lambda self, state_bytes: None)  # it is taken between check and use
    events: Events = []
    snapshots = Snapshots(small_disk / "user" / "run", tmp_path)
    saver = saver_of(RunFolder(tmp_path / "run"), tell=lambda message, event: events.append(event), snapshots=snapshots)
    (small_disk / "filler").write_bytes(bytes(200 << 10))
    take(saver, 1)
    assert [event["event"] for event in events] == ["snapshots off"] and "no room" in events[0]["why"]
    assert sorted(path.name for path in snapshots.folder.iterdir()) == ["run"]
    saver.close()


def test_a_save_and_a_snapshot_of_one_step_are_both_taken(
    taker: tuple[Saver, Events], snapshots: Snapshots, tmp_path: Path
) -> None:
    saver, events = taker
    take(saver, 1)
    assert saver.wants_snapshot(2) and saver.wants_to_save(2, due=True)
    saver.save(state(2), in_memory=True)
    saver.wait()
    memory_of(saver).wait()
    saver.poll()
    assert {(event["event"], event["step"]) for event in events[1:]} == {("saved", 2), ("snapshot", 2)}


@pytest.mark.parametrize(
    ("local_rank", "local_size", "part"),
    [(0, "1", (0, 1)), (0, "2", (0, 2)), (1, "2", (1, 2)), (3, None, (0, 1)), (3, "2", (0, 1))],
)
def test_each_rank_of_a_host_has_a_part_or_all_of_it_if_their_number_is_not_known(
    local_rank: int, local_size: str | None, part: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local_size is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    assert own_part(World(Place(local_rank, 4, local_rank), CPU)) == part
