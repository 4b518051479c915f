"""Whole runs on a disk that takes long to flush a file: they train meanwhile, and end soon after their last step."""

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.small import small

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
