"""Saving while training goes on: killed anywhere, on one rank or two, a run always has a valid checkpoint."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import TIMEOUT_S, run_ranks
from helpers.saved import save, saver_of, state, trained
from torch import nn
from torch._C._distributed_c10d import FileStore

from drumline.checkpoint import saver as saver_module
from drumline.checkpoint.checkpoints import open_checkpoint
from drumline.checkpoint.in_memory import snapshots_of
from drumline.checkpoint.newest import newest_valid
from drumline.checkpoint.restoring import load
from drumline.checkpoint.state import weights
from drumline.errors import CheckpointError
from drumline.files.run_folder import RunFolder
from drumline.parallel.group import Group
from drumline.parallel.world import Place, World
from drumline.units import count


def world_of(rank: int, size: int, meeting: Path) -> World:
    place, device = Place(rank=rank, size=size, local_rank=rank), torch.device("cpu")
    return Group(place, device, FileStore(str(meeting), size)) if size > 1 else World(place, device)


def forked(size: int, work: Callable[[int], None]) -> list[int]:
    """Do `work(rank)` in a process for each rank, forked from this one; when one dies the others are killed.

    Gives how each ended, as subprocess does. Only for a process that has no threads.
    """
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
                os._exit(1)
        pids.append(pid)
    codes: dict[int, int] = {}
    while len(codes) < size:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in set(pids) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


@dataclass(frozen=True)
class Sweep:
    """A run that is killed again and again, on so many ranks."""

    root: Path
    size: int
    of: tuple[nn.Module, torch.optim.Optimizer] = field(default_factory=trained)

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / "run")

    def points(self) -> list[tuple[int, str]]:
        """Every point that a save passes on each rank."""

        def save_once(rank: int) -> None:
            points: list[str] = []
            world = world_of(rank, self.size, self.root / "meet")
            each = saver_of(RunFolder(self.root / "first"), world=world, reached=points.append, of=self.of)
            each.save(state(1))
            each.wait()
            (self.root / f"points-{rank}").write_text(json.dumps(points))

        assert forked(self.size, save_once) == [0] * self.size
        read = [json.loads((self.root / f"points-{rank}").read_text()) for rank in range(self.size)]
        return [(rank, point) for rank, points in enumerate(read) for point in points]

    def kill(self, number: int, victim: int, when: str | float) -> None:
        """Go on from the newest checkpoint, save once, and die in a later save, at a point or after a time."""

        def save_until_killed(rank: int) -> None:
            world = world_of(rank, self.size, self.root / f"meet-{number}")
            armed = False

            def reached(point: str) -> None:
                if armed and point == when and rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)

            saver = saver_of(self.folder, world=world, reached=reached, of=self.of)
            step = world.on_rank0(lambda: newest_step(self.folder))
            while True:
                step += 1
                saver.save(state(step))
                saver.wait()
                world.gather(None)
                if not armed:
                    assert not list(self.folder.checkpoints.glob(".step-*")), "leftovers of the one before"
                    world.gather(None)
                    if isinstance(when, float) and rank == victim:
                        threading.Timer(when, os.kill, (os.getpid(), signal.SIGKILL)).start()
                armed = True

        assert forked(self.size, save_until_killed) == [-signal.SIGKILL] * self.size, (victim, when)


def newest_step(folder: RunFolder) -> int:
    said: list[str] = []
    checkpoint = newest_valid(folder.checkpoints, warn=said.append)
    assert said == []  # a kill damages nothing that has its name
    return checkpoint.step if checkpoint else 0


def sweep(root: Path, size: int, kills: int) -> int:
    run = Sweep(root, size)
    points = run.points()
    assert {(0, "before the rename"), (0, "pruned")} < set(points)
    draw = random.Random(0)
    at_random = [(draw.randrange(size), draw.uniform(0, 0.05)) for _ in range(kills // 4)]
    ways: list[tuple[int, str | float]] = [*(points * kills)[: kills - len(at_random)], *at_random]
    last = 0
    for number, (victim, when) in enumerate(ways):
        run.kill(number, victim, when)
        step = newest_step(run.folder)
        assert step > last, (victim, when)
        last = step
    clean = saver_of(run.folder, of=run.of)
    clean.save(state(last + 1))
    clean.wait()
    names = sorted(path.name for path in run.folder.checkpoints.iterdir())
    assert names == [RunFolder.checkpoint_name(step) for step in range(last - 1, last + 2)]
    return len(ways) if len(ways) >= 2 * len(points) else 0


@pytest.mark.parametrize(("size", "kills"), [(1, 60), (2, 50)])
def test_a_process_killed_anywhere_in_a_save_leaves_a_valid_checkpoint_and_the_next_one_goes_on(
    tmp_path: Path, size: int, kills: int
) -> None:
    (outcome,) = run_ranks(partial(check, sweep), [(tmp_path, size, kills)])
    assert outcome.value == str(kills), outcome.err


def check(work: Callable[..., Any], *arguments: Any) -> str:
    """The result as a word: a number would count as an exit code."""
    return str(work(*arguments))


@contextmanager
def telling(
    folder: RunFolder, **settings: Any
) -> Iterator[tuple[saver_module.Saver, list[tuple[str, dict[str, Any]]]]]:
    """A saver, and all that it tells."""
    folder.checkpoints.mkdir(parents=True)
    reports: list[tuple[str, dict[str, Any]]] = []
    saver = saver_of(folder, tell=lambda message, event: reports.append((message, event)), **settings)
    yield saver, reports
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
        load(open_checkpoint(folder.checkpoint(1)), model=saver._model, optimizer=None)
        after = weights(saver._model)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_save_tells_its_bytes_its_stall_and_its_time(tmp_path: Path) -> None:
    with telling(RunFolder(tmp_path / "run")) as (saver, reports):
        saver.save(state(4))
        saver.wait()
    ((message, event),) = reports
    assert message == "" and event["event"] == "saved" and event["step"] == 4
    assert event["bytes"] > 100 and event["stall_s"] >= 0 and event["written_s"] > 0


def test_a_large_save_tells_how_long_copying_writing_and_reading_back_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_SMALL_BYTES", 0)
    with telling(RunFolder(tmp_path / "run")) as (saver, reports):
        saver.save(state(4))
        saver.wait()
    event = reports[-1][1]
    assert {"copy_s", "write_s", "check_s"} <= event.keys()
    assert event["stall_s"] + event["written_s"] >= event["write_s"]  # writing begins while training may still stand


def test_a_large_checkpoint_that_the_disk_does_not_have_as_it_was_written_is_set_aside_and_the_one_before_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_SMALL_BYTES", 0)
    folder, bad = RunFolder(tmp_path / "run"), list[str]()

    def reached(point: str) -> None:
        if point == "after the rename" and bad:
            with next(folder.checkpoint(20).glob("model-*")).open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\x55")

    with telling(folder, reached=reached) as (saver, reports):
        saver.save(state(10))
        saver.wait()
        bad.append("disk")
        saver.save(state(20))
        saver.wait()
        assert reports[-1][1]["event"] == "save failed" and "what is read back" in reports[-1][1]["why"]
        assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step-00000010", "step-00000020.damaged"]
        bad.clear()
        saver.save(state(21))
        saver.wait()
        assert saver.saved_step == 21


def test_a_save_that_fails_is_told_at_the_next_step_and_the_checkpoint_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    with telling(folder) as (saver, reports):
        saver.save(state(10))
        saver.wait()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        saver.save(state(20))
        saver._job.own.exception(TIMEOUT_S)  # type: ignore[union-attr]
        assert len(reports) == 1  # nobody is told in the middle of a step
        saver.poll()
        message, event = reports[1]
        assert event["event"] == "save failed" and event["step"] == 20 and event["why"] == "No space left on device"
        assert str(folder.checkpoints) in message and f"({count(event['bytes'])}B needed, " in message
        assert "The one of step 10 is kept" in message and "retried in 2 s" in message and "\n" not in message
        assert [p.name for p in folder.checkpoints.iterdir()] == ["step-00000010"]
        assert not saver.wants_to_save(21, due=False)  # not yet
        monkeypatch.undo()
        saver._retry_at = 0.0
        assert saver.wants_to_save(21, due=False)
        saver.save(state(21))
        saver.wait()
        assert saver.saved_step == 21 and not saver.wants_to_save(22, due=False)


def test_a_disk_that_stays_full_for_days_is_tried_at_most_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with telling(RunFolder(tmp_path / "run")) as (saver, reports):
        monkeypatch.setattr(saver, "_write_part", _refuse)
        saver._failures = 5000
        saver.save(state(1))
        saver.wait()
    assert "retried in 60 s" in reports[-1][0]


def _refuse(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_run_that_must_stop_gives_up_after_a_few_tries_and_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_RETRY_S", (0.001, 0.01))
    folder = RunFolder(tmp_path / "run")
    with telling(folder) as (saver, reports):
        save(folder, 3)
        monkeypatch.setattr(saver, "_write_part", _refuse)
        with pytest.raises(CheckpointError, match="step 9 could not be saved") as raised:
            saver.finish(state(9), give_up=lambda: True)
    assert "the newest checkpoint is of step 3" in raised.value.problem and "kept in /dev/shm" in raised.value.problem
    assert [event["event"] for _, event in reports] == ["save failed"] * 3
    snapshots = snapshots_of(RunFolder(folder.path))
    kept = snapshots.newest(warn=print, device=torch.device("cpu"))
    snapshots.clear()
    assert kept is not None and kept.found.step == 9  # a start that comes soon enough goes on from there


def test_a_run_folder_that_is_gone_is_not_made_anew_where_its_disk_was(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with telling(folder) as (saver, reports):
        folder.path.rename(tmp_path / "away")
        saver.save(state(1))
        saver.wait()
    assert reports[0][1]["event"] == "save failed" and not folder.path.exists()


def on_two_hosts(root: Path) -> list[int]:
    """Rank 1's host has a disk of its own where rank 0's has the run."""
    of = trained()

    def work(rank: int) -> None:
        folder = RunFolder(root / ("run", "elsewhere")[rank])
        saver = saver_of(folder, world=world_of(rank, 2, root / "meet"), of=of)
        saver.save(state(1))
        saver.wait()
        saver._world.gather(None)

    return forked(2, work)


def test_a_rank_that_does_not_see_the_folder_writes_nothing(tmp_path: Path) -> None:
    (outcome,) = run_ranks(on_two_hosts, [(tmp_path,)])
    assert outcome.value == [0, 0], outcome.err
    folder = RunFolder(tmp_path / "run")
    assert open_checkpoint(folder.checkpoint(1)).step == 1 and not (tmp_path / "elsewhere").exists()
    assert [p.name for p in folder.checkpoint(1).glob("model*")] == ["model-00001-of-00001.safetensors"]


def one_runs_ahead(root: Path) -> list[int]:
    """Rank 0 is slow to conclude its first save; rank 1 has written its part of the second by then."""
    of = trained()

    def work(rank: int) -> None:
        world = world_of(rank, 2, root / "meet")
        assert world.store is not None
        store, events = world.store, []

        def reached(point: str) -> None:
            if rank == 0 and point == "after the rename":
                store.wait(["rank 1 is ahead"], timedelta(seconds=TIMEOUT_S))

        def tell(message: str, event: dict[str, Any]) -> None:
            events.append(event["event"])

        saver = saver_of(RunFolder(root / "run"), world=world, reached=reached, tell=tell, of=of)
        for step in (1, 2):
            saver.save(state(step))
            if rank == 1:
                saver.wait()
        store.set("rank 1 is ahead", "") if rank == 1 else None
        saver.wait()
        assert rank == 1 or events == ["saved", "saved"], events
        world.gather(None)

    return forked(2, work)


def test_a_rank_that_is_ahead_keeps_what_it_wrote_of_the_next_checkpoint(tmp_path: Path) -> None:
    (outcome,) = run_ranks(one_runs_ahead, [(tmp_path,)])
    assert outcome.value == [0, 0], outcome.err
    assert open_checkpoint(RunFolder(tmp_path / "run").checkpoint(2)).step == 2


STAGED = """
import threading, time, psutil, torch
from drumline.snapshots.copies import Copies, Staging
from drumline.snapshots.layout import Layout
torch.set_num_threads(4)
CPU = torch.device("cpu")
counts, waited = [], []
def prepare():
    before = psutil.Process().num_threads()
    Staging(Copies(CPU), CPU).prepare(Layout.of({"weights": torch.empty(1 << 20)}))
    while psutil.Process().num_threads() > before and len(waited) < 500:  # one that has ended is not gone at once
        waited.append(time.sleep(0.01))
    counts.append(psutil.Process().num_threads() - before)
    torch.zeros(1 << 20).add_(1.0)
    counts.append(psutil.Process().num_threads() - before)
thread = threading.Thread(target=prepare)
thread.start()
thread.join()
print(*counts)
"""


def test_making_room_for_a_save_starts_no_threads_that_would_compete_with_training() -> None:
    done = subprocess.run([sys.executable, "-c", STAGED], capture_output=True, text=True, check=True)
    by_staging, by_torch = map(int, done.stdout.split())
    assert by_staging == 0 < by_torch  # what torch itself does in such a thread would
