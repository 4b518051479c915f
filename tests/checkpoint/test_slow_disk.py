"""Whole runs on a disk that takes long to flush a file: they train meanwhile, and end soon after their last step."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.saved import saver_of, state
from helpers.small import small

from drumline.checkpoint import saver as saver_module
from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

STEPS = 40
TIMEOUT_S = 60
FLAGS = small("--train_data_path", "text", "--run_dir", "run", "--total_steps", str(STEPS), "--save_every", "10")


class SlowDisk:
    """Flushes what is in checkpoints/ only once the last step is done, and then as much at a time as it is asked to."""

    def __init__(self, together: list[set[str]]) -> None:
        """together: groups of files, by name, each flushed only once all of it is asked for"""
        self._asked, self._together, self._fsync = Path("asked"), together, os.fsync

    def fsync(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        with self._asked.open("a") as file:
            file.write(f"{path}\n")
        if "checkpoints" in path.parts:
            self._wait(path)
        self._fsync(descriptor)

    def _wait(self, path: Path) -> None:
        fellows = {path.with_name(name) for group in self._together if path.name in group for name in group}
        deadline = time.monotonic() + TIMEOUT_S
        while not (self._is_over() and fellows <= set(map(Path, self._asked.read_text().splitlines()))):
            assert time.monotonic() < deadline, f"{path} is flushed alone, or the run waits for it"
            time.sleep(0.01)

    def _is_over(self) -> bool:
        return any(record["step"] == STEPS for record in read_metrics(Path("run/metrics.jsonl")))


def train_on_slow_disk(flags: list[str], together: list[set[str]]) -> int:
    from drumline.cli.app import run_command

    os.fsync = os.fdatasync = SlowDisk(together).fsync
    return run_command(["train", *FLAGS, *flags])


@pytest.mark.parametrize(("ranks", "flags"), [(1, []), (2, ["--snapshot_every", "1000"])], ids=["alone", "two ranks"])
def test_a_disk_that_flushes_slowly_holds_up_no_step_and_the_end_only_for_the_last_save(
    here: Path, ranks: int, flags: list[str]
) -> None:
    files = {f"{kind}-{r:05d}-of-{ranks:05d}.safetensors" for kind in ("model", "optimizer") for r in (1, ranks)}
    together = [files, {"run.json", "manifest.json"}]
    outcomes = run_ranks(train_on_slow_disk, [(flags, together) for _ in range(ranks)])
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes
    folder = RunFolder(here / "run")
    # The save of step 10 was held until the last step: those of 20 and 30 are left out, not queued.
    assert [path.name for path in checkpoint_paths(folder.checkpoints)] == ["step-00000010", f"step-{STEPS:08d}"]
    assert open_checkpoint(folder.checkpoint(STEPS)).step == folder.read_status()["step"] == STEPS
    assert folder.read_status()["state"] == "finished"
    # Each file is flushed once, however many tensors are in it, and reports are hardly flushed at all.
    asked = Counter(path.split("/run/")[1] for path in Path("asked").read_text().splitlines() if "/run/" in path)
    saves = {name: count for name, count in asked.items() if ".partial-" in name}
    assert set(saves.values()) == {1} and len(saves) == 2 * len({*files, "run.json", "manifest.json", "the folder"})
    assert asked["checkpoints"] == 2
    assert sum(asked.values()) - sum(saves.values()) - 2 <= 7, asked


class Held:
    """A saver of a small state whose clock moves only when it sleeps, and whose disk waits to be let go."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.reports, self._free = 100.0, list[tuple[str, dict[str, Any]]](), threading.Event()
        monkeypatch.setattr(saver_module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep))
        run = RunFolder(folder)
        run.checkpoints.mkdir(parents=True)
        self.while_asleep: Callable[[], None] = lambda: None
        self.saver = saver_of(
            run,
            tell=lambda message, event: self.reports.append((message, event)),
            reached=lambda point: self._free.wait(TIMEOUT_S) and None,
        )

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.while_asleep()

    def save(self, step: int) -> None:
        self._free.clear()
        self.saver.save(state(step))
        assert self.saver._job is not None
        self.saver._job.since = self.now_s

    def let_go(self) -> None:
        """The save that is under way is on disk, and the saver knows."""
        self._free.set()
        job = self.saver._job
        if job is not None and job.own is not None:
            job.own.result(TIMEOUT_S)
            self.saver.poll()
            assert job.commit is not None
            job.commit.result(TIMEOUT_S)
            self.saver.poll()

    def comes_due(self, step: int, *, after_s: float) -> tuple[bool, float]:
        """Whether this step is saved, and how long training stood."""
        self.now_s += after_s
        before_s = self.now_s
        return self.saver.wants_to_save(step, due=True), self.now_s - before_s


def test_a_small_state_waits_a_second_in_all_of_a_run_which_counts_as_stall_and_then_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path / "run", monkeypatch)
    held.save(16)
    saves, waited_s = held.comes_due(32, after_s=0.1)
    assert not saves and 1.0 <= waited_s < 1.01
    held.now_s = 101.53
    held.let_go()
    # 1.53 s for a save, 0.1 s for 16 steps: the second that training stood is not part of the interval.
    assert "longer than --save_every (16 steps, 0.1 s)" in held.reports[0][0]
    assert held.reports[0][0].endswith("use --save_every 245")
    assert held.saver.wants_to_save(40, due=False)
    held.save(40)
    saves, second_s = held.comes_due(48, after_s=0.1)
    assert not saves and second_s < 0.01
    held.now_s += 10.0
    held.let_go()
    held.save(60)
    saves, third_s = held.comes_due(64, after_s=10.0)  # a hundredth of the time since the last one
    assert not saves and 0.1 <= third_s < 0.11
    held.let_go()
    assert [event["stall_s"] for _, event in held.reports] == pytest.approx([0.0, waited_s, second_s])


def test_a_small_state_that_is_on_disk_within_a_moment_is_saved_at_the_step_that_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(tmp_path / "run", monkeypatch)
    for step in range(1, 6):
        held.save(step)
        held.while_asleep = held.let_go
        assert held.comes_due(step + 1, after_s=0.0)[0]
    assert [message for message, _ in held.reports] == [""] * 5
