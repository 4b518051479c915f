"""The snapshots of a host: complete when all parts are, the newest whole one is used, and no memory stays taken."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.saved import ALONE, tensors_of, trained

from drumline.checkpoint import resuming
from drumline.files.run_folder import RunFolder
from drumline.snapshots.folder import Snapshots
from drumline.snapshots.layout import Layout
from drumline.snapshots.slots import Slot

CPU = torch.device("cpu")


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(resuming, "MEMORY", tmp_path / "shm")
    return tmp_path / "shm"


def snapshots_of(run: Path, name: str = "run") -> Snapshots:
    return Snapshots(resuming.snapshot_folder(name), run)


def put(snapshots: Snapshots, letter: str, step: int, *, part: int = 0, parts: int = 1, token: str = "t") -> Slot:
    """Each step has weights of its own."""
    snapshots.make_folder()
    tensors = tensors_of(*trained(seed=step))
    slot = Slot(
        snapshots.folder / f"{part}-of-{parts}-{letter}",
        Layout.of(dict(list(tensors.items())[part::parts])),
        device=CPU,
    )
    slot.open()
    for name, view in slot.layout.views(slot.data).items():
        view.copy_(tensors[name])
    with ThreadPoolExecutor(1) as threads:
        slot.seal(step, token, {"step": step}, threads)
    return slot


def newest(snapshots: Snapshots) -> tuple[int | None, list[str]]:
    said: list[str] = []
    found = snapshots.newest(warn=said.append, device=CPU)
    if found is None:
        return None, said
    expected = tensors_of(*trained(seed=found.found.step))
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(found.tensors[name], expected[name]) for name in expected)
    return found.found.step, said


def test_the_newest_complete_one_is_used(memory: Path, tmp_path: Path) -> None:
    snapshots = snapshots_of(tmp_path)
    assert newest(snapshots) == (None, [])
    put(snapshots, "a", 3).close()
    put(snapshots, "b", 5).close()
    assert newest(snapshots) == (5, [])
    put(snapshots, "a", 7).open()
    assert newest(snapshots) == (5, [])
    assert snapshots.folder.stat().st_mode & 0o777 == 0o700


def test_parts_are_one_snapshot_if_they_are_of_the_same_step_and_the_same_ranks(memory: Path, tmp_path: Path) -> None:
    snapshots = snapshots_of(tmp_path)
    for part in (0, 1):
        put(snapshots, "a", 3, part=part, parts=2).close()
    put(snapshots, "b", 5, part=0, parts=2).close()
    assert newest(snapshots) == (3, [])
    put(snapshots, "b", 5, part=1, parts=2, token="other").close()
    assert newest(snapshots) == (3, [])
    put(snapshots, "b", 5, part=1, parts=2).close()
    assert newest(snapshots) == (5, [])
    put(snapshots, "a", 6).close()  # of a single rank on this host
    assert newest(snapshots) == (6, [])


def test_a_damaged_one_is_passed_over_named_and_written_over_first(memory: Path, tmp_path: Path) -> None:
    snapshots = snapshots_of(tmp_path)
    put(snapshots, "a", 3).close()
    put(snapshots, "b", 5).close()
    path = snapshots.folder / "0-of-1-b"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    step, said = newest(snapshots)
    assert step == 3 and len(said) == 1 and f"{path} is damaged: its data do not match their checksums" in said[0]
    assert newest(snapshots) == (3, []) and [found.step for found in snapshots.complete()] == [3]


def test_one_that_is_written_over_while_it_is_read_is_noticed(memory: Path, tmp_path: Path) -> None:
    snapshots = snapshots_of(tmp_path)
    slot = put(snapshots, "a", 3)
    read = snapshots.newest(warn=print, device=CPU)
    assert read is not None and read.is_still_there()
    slot.open()
    assert not read.is_still_there()


def test_the_memory_is_given_back_and_other_runs_keep_theirs(memory: Path, tmp_path: Path) -> None:
    one, other = (snapshots_of(tmp_path, name) for name in ("one", "other"))
    for snapshots in (one, other):
        put(snapshots, "a", 1).close()
    one.clear()
    assert not one.folder.exists() and newest(other) == (1, [])
    other.clear()
    assert list(memory.iterdir()) == []


def test_the_memory_of_a_run_that_was_deleted_is_given_back_by_the_next_one(memory: Path, tmp_path: Path) -> None:
    held = {}
    for name in ("gone", "living"):
        (tmp_path / name).mkdir()
        held[name] = put(snapshots_of(tmp_path / name, name), "a", 1)
    shutil.rmtree(tmp_path / "gone")
    living, gone = snapshots_of(tmp_path / "living", "living"), snapshots_of(tmp_path / "gone", "gone")
    living.forget_others()
    assert gone.folder.exists()  # its process still lives
    held["gone"].close()
    living.forget_others()
    assert not gone.folder.exists() and newest(living) == (1, [])


def test_the_memory_of_a_run_whose_folder_another_run_has_now_is_given_back(memory: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    first = snapshots_of(run.path, run.run_id())
    put(first, "a", 1).close()
    other = snapshots_of(tmp_path, "other")
    other.forget_others()
    assert newest(first) == (1, [])  # it was killed, and may be resumed
    run.identity.unlink()
    other.forget_others()
    assert newest(first) == (1, [])  # nobody else is there
    second = snapshots_of(run.path, RunFolder(run.path).run_id())
    put(second, "a", 2).close()
    held = put(first, "b", 3)
    other.forget_others()
    assert newest(first) == (3, [])  # its process still lives
    held.close()
    other.forget_others()
    assert not first.folder.exists() and newest(second) == (2, [])


def test_slots_of_another_number_of_ranks_are_given_back(memory: Path, tmp_path: Path) -> None:
    snapshots = snapshots_of(tmp_path)
    kept = put(snapshots, "a", 1, part=0, parts=3)
    put(snapshots, "b", 2, part=0, parts=2).close()
    put(snapshots, "a", 3).close()
    snapshots.forget_parts(1)
    assert sorted(path.name for path in snapshots.folder.iterdir()) == ["0-of-1-a", "0-of-3-a", "run"]
    kept.close()
    snapshots.forget_parts(1)
    assert sorted(path.name for path in snapshots.folder.iterdir()) == ["0-of-1-a", "run"]


def test_a_state_that_cannot_be_saved_is_kept_beside_what_there_is(memory: Path, tmp_path: Path) -> None:
    snapshots = snapshots_of(tmp_path)
    slot = put(snapshots, "a", 3)
    snapshots.store(tensors_of(*trained(seed=9)), 9, {"step": 9}, token="unsaved")
    assert newest(snapshots) == (9, [])
    slot.close()


def test_a_run_that_takes_no_snapshots_and_has_left_none_does_without_them(memory: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    assert resuming.find_snapshots(run, ALONE, takes=False) is None
    assert not resuming.has_begun("auto", run, ALONE, None) and resuming.has_begun("4", run, ALONE, None)
    snapshots = resuming.find_snapshots(run, ALONE, takes=True)
    assert snapshots is not None
    put(snapshots, "a", 1).close()
    left = resuming.find_snapshots(RunFolder(run.path), ALONE, takes=False)
    assert left is not None and left.folder == snapshots.folder and resuming.has_begun("auto", run, ALONE, left)


def test_room_can_be_measured_while_another_process_replaces_its_files(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "user" / "memory", tmp_path / "run")
    snapshots.folder.mkdir(parents=True)
    done = threading.Event()

    def replace_them() -> None:
        while not done.is_set():
            (snapshots.folder / "0-of-1-a").write_bytes(b"1")
            (snapshots.folder / "0-of-1-a").unlink()

    other = threading.Thread(target=replace_them)
    other.start()
    try:
        assert [snapshots.no_room(1) for _ in range(500)] == [None] * 500
    finally:
        done.set()
        other.join()
