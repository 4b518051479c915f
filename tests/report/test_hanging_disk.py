"""Whole runs on a disk or a console that hangs, or is slow: no step waits for it, and what it answers to is written."""

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.ranks import run_ranks
from helpers.small import small
from helpers.warm import Warm, piped

from drumline.errors import EXIT_FAILED
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics

TIMEOUT_S = 120
STEPS = 200
FLAGS = small("--train_data_path", "text", "--run_dir", "run", "--total_steps", str(STEPS), "--save_every", "1000")


class Said:
    """What a process prints, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.text = ""
        self._process = process
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.text += line

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._process.poll() is None and time.monotonic() < deadline, self.text
            time.sleep(0.01)

    def end(self) -> int:
        code = self._process.wait(TIMEOUT_S)
        self._reading.join(TIMEOUT_S)
        return code


def hang(metrics: Path) -> None:
    """From now on nothing that writes to metrics.jsonl returns; what it had so far is in `before`."""
    os.link(metrics, "before")
    os.mkfifo("pipe")
    os.replace("pipe", metrics)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_hangs_holds_up_no_step_and_loses_no_line_if_it_answers_in_the_end(here: Path, ranks: int) -> None:
    flags = [*FLAGS, "--nproc", str(ranks)] if ranks > 1 else FLAGS
    metrics = here / "run/metrics.jsonl"
    with piped(["-m", "drumline", "train", *flags]) as process:
        try:
            said = Said(process)
            said.wait_for(lambda: read_metrics(metrics))
            hang(metrics)
            said.wait_for(lambda: f"step {STEPS:>4}/{STEPS}" in said.text)
            said.wait_for(lambda: "waiting for run/metrics.jsonl, 30 s at most" in said.text)
            answers = os.open(metrics, os.O_RDWR)
            after = b""
            while b'"step": 200, "valid_loss"' not in after:
                after += os.read(answers, 1 << 16)
            assert said.end() == 0, said.text
            os.close(answers)
        finally:
            process.kill()
    lines = Path("before").read_bytes().splitlines() + after.splitlines()
    assert [r["step"] for r in map(json.loads, lines) if "loss" in r] == [*range(1, STEPS + 1)]
    assert "restarting" not in said.text and "lacks" not in said.text
    assert RunFolder(here / "run").read_status()["state"] == "finished"


def train_without_metrics() -> int:
    """A run whose metrics.jsonl is a pipe that nobody reads, and which is not waited for as long."""
    from drumline.cli.app import run_command
    from drumline.report import records

    hold = RunFolder.hold

    @contextmanager
    def holding(folder: RunFolder) -> Iterator[None]:
        with hold(folder):
            os.mkfifo(folder.metrics)  # not before: a folder that has a pipe is refused
            yield

    RunFolder.hold = holding  # type: ignore[method-assign, assignment]
    records._PATIENCE_S, records._SOON_S = 1.0, 0.2
    return run_command(["train", *FLAGS])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_never_answers_ends_no_run_and_what_is_lost_is_told(here: Path, ranks: int) -> None:
    outcomes = run_ranks(train_without_metrics, [() for _ in range(ranks)])
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes
    said, folder = outcomes[0].out, RunFolder(here / "run")
    assert f"step {STEPS:>4}/{STEPS}" in said and "waiting for run/metrics.jsonl, 1 s at most" in said
    # Each step, and a validation after each tenth.
    assert f"warning: run/metrics.jsonl lacks {STEPS + 10} lines that could not be written" in said, said
    assert folder.read_status()["state"] == "finished" and folder.read_status()["step"] == STEPS
    assert folder.log.read_text().count("| loss ") == STEPS
    assert read_metrics(folder.events)[-1]["event"] == "finished"


SLOW = """
import sys, time
from drumline.files.disk import LineFile
append = LineFile.append
def slowly(self, line):
    time.sleep(0.01)
    append(self, line)
LineFile.append = slowly
from drumline.cli.app import main
main()
"""


@pytest.mark.parametrize("ends", ["at its last step", "with an error", "when asked to stop"])
def test_however_a_run_ends_its_last_line_is_on_a_disk_that_is_slow(here: Path, ends: str) -> None:
    more = {
        "at its last step": ["--total_steps", "50"],
        "with an error": ["--lr", "1e38", "--warmup_steps", "0", "--on_nonfinite", "halt", "--grad_clip", "0"],
        "when asked to stop": ["--total_steps", "100000"],
    }[ends]
    with piped(["-c", SLOW, "train", *small(*FLAGS, *more)]) as process:
        try:
            said = Said(process)
            if ends == "when asked to stop":
                said.wait_for(lambda: "30/100,000" in said.text)
                process.terminate()
            code = said.end()
        finally:
            process.kill()
    folder = RunFolder(here / "run")
    assert code == {"at its last step": 0, "with an error": EXIT_FAILED, "when asked to stop": 75}[ends], said.text
    shown = [line for line in said.text.splitlines() if "| loss" in line]
    assert len([record for record in read_metrics(folder.metrics) if "loss" in record]) == len(shown) > 0
    status = folder.read_status()
    assert status["state"] == {0: "finished", EXIT_FAILED: "failed", 75: "stopped"}[code]
    assert [line for line in folder.log.read_text().splitlines() if "| loss" in line] == shown
    assert "lacks" not in said.text


@contextmanager
def unread(code: str, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process whose stdout is a pipe that nobody reads and that is soon full, and the end to read."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with Warm([sys.executable, "-c", code, *words], stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        try:
            yield process, reader
        finally:
            process.kill()
            os.close(reader)


HURRIED = """
import sys
sys.stdout = open(1, "w", closefd=False)  # buffered: a thread that hangs in a write has its lock
from drumline.report import records
records._PATIENCE_S, records._SOON_S = 0.5, 0.1
from drumline.cli.app import main
main()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_console_that_nobody_reads_holds_up_no_step_and_has_every_line_once_it_is_read(
    here: Path, ranks: int
) -> None:
    flags = [*FLAGS, "--nproc", str(ranks)] if ranks > 1 else FLAGS
    with unread("from drumline.cli.app import main; main()", "train", *flags) as (process, reader):
        deadline, folder = time.monotonic() + TIMEOUT_S, RunFolder(here / "run")
        while folder.read_status().get("state") != "finished" or not folder.log.read_text().count("\nfinished: "):
            assert process.poll() is None and time.monotonic() < deadline, read_metrics(folder.metrics)[-1:]
            time.sleep(0.01)
        said = b""
        while part := os.read(reader, 1 << 16):
            said += part
        assert process.wait(TIMEOUT_S) == 0 and process.stderr is not None and process.stderr.read() == b""
    assert said.decode() == folder.log.read_text() and said.count(b"| loss ") == STEPS
    assert b"lacks" not in said and b"restarting" not in said
    assert [r["step"] for r in read_metrics(folder.metrics) if "loss" in r] == [*range(1, STEPS + 1)]


def test_a_console_that_is_never_read_ends_no_run_and_the_log_says_what_it_lacks(here: Path) -> None:
    with unread(HURRIED, "train", *FLAGS) as (process, reader):
        assert process.wait(TIMEOUT_S) == 0
        folder, said = RunFolder(here / "run"), os.read(reader, 1 << 16)
    log = folder.log.read_text()
    lacks = re.search(r"warning: the console lacks (\d+) lines that could not be written", log)
    assert lacks and log.encode().startswith(said) and 0 < said.count(b"| loss ") < STEPS
    assert folder.read_status()["state"] == "finished" and folder.report.exists()
