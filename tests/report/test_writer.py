"""What a thread writes: in order, while nobody waits for a disk that fails or hangs, and what is lost is counted."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.files.disk import LineFile
from drumline.report import records, writer
from drumline.report.records import JsonlSink, Record, Records, read_metrics
from drumline.report.writer import Writer


class Disk:
    """Takes lines once it answers."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.asked, self.answers = threading.Event(), threading.Event()

    def write(self, line: int) -> None:
        self.asked.set()
        assert self.answers.wait(60)
        self.lines.append(line)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answers.set()


def put(to: Writer, write: Callable[[int], object], *numbers: int) -> None:
    for number in numbers:
        to.put(lambda number=number: write(number))  # type: ignore[misc]


def test_a_disk_that_hangs_is_told_once_and_gets_everything_in_order_when_it_answers(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    to = Writer("the disk", said.append)
    put(to, disk.write, 1)
    assert disk.asked.wait(60)
    monkeypatch.setattr(writer, "_SLOW_S", 0.0)
    put(to, disk.write, *range(2, 500))
    assert said == ["warning: cannot write to the disk (it does not answer); the run continues and retries"]
    assert to.settle(0.01) == 499
    disk.answers.set()
    assert to.settle(60) == 0 and disk.lines == [*range(1, 500)]
    assert said[1:] == ["the disk is writable again"]


def test_lines_that_wait_are_bounded_the_oldest_go_first_and_are_counted(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_KEPT", 3)
    to = Writer("the disk", lambda message: None)
    put(to, disk.write, 0)
    assert disk.asked.wait(60)
    put(to, disk.write, 1, 2, 3, 4, 5)
    assert to.settle(0) == 6
    disk.answers.set()
    assert to.settle(60) == 2 and disk.lines == [0, 3, 4, 5]


def test_a_write_that_fails_is_retried_with_the_next_before_it(tmp_path: Path) -> None:
    said: list[str] = []
    lines, to = LineFile(tmp_path / "away/lines"), Writer("lines", said.append)
    for number in range(5):
        to.put(lambda number=number: lines.append(str(number)))  # type: ignore[misc]
        assert to.settle(60) == number + 1
    (tmp_path / "away").mkdir()
    to.put(lambda: lines.append("5"))
    assert to.settle(60) == 0 and (tmp_path / "away/lines").read_text() == "0\n1\n2\n3\n4\n5\n"
    missing = "warning: cannot write to lines (No such file or directory); the run continues and retries"
    assert said == [missing, "lines is writable again"]


def test_a_disk_that_answers_slowly_is_waited_for_however_much_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    to, written, between = Writer("the disk", lambda message: None), list[int](), threading.Event()

    def slowly(number: int) -> None:
        between.wait(0.02)
        written.append(number)

    put(to, slowly, *range(50))
    assert to.settle(0.5) == 0 and len(written) == 50


def test_a_tracker_that_hangs_keeps_no_other_from_its_lines_and_is_given_up_at_the_end(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Hanging:
        def write(self, record: Record) -> None:
            disk.write(record["step"])

        def close(self) -> None: ...

    monkeypatch.setattr(records, "_SOON_S", 0.05)
    monkeypatch.setattr(records, "_PATIENCE_S", 0.2)
    to = Records([Hanging(), JsonlSink(tmp_path / "metrics.jsonl")], log=tmp_path / "train.log")
    for step in range(1, 11):
        to.write({"step": step, "loss": 1.0})
    to.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 11)]
    said = capsys.readouterr().out
    assert said.count("waiting for Hanging, 0 s at most") == 1
    assert said.endswith("warning: Hanging lacks 11 lines that could not be written\n"), said
    assert (tmp_path / "train.log").read_text().count("step ") == 10


def test_a_named_pipe_that_nobody_reads_holds_up_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "_SOON_S", 0.05)
    monkeypatch.setattr(records, "_PATIENCE_S", 0.05)
    os.mkfifo(tmp_path / "metrics.jsonl")
    to = Records([JsonlSink(tmp_path / "metrics.jsonl")], log=tmp_path / "train.log")
    for step in range(1, 4):
        to.write({"step": step, "loss": 1.0})
    to.close()
    assert "lacks 3 lines" in capsys.readouterr().out
    pipe = os.open(tmp_path / "metrics.jsonl", os.O_RDWR)
    with os.fdopen(pipe) as reader:  # or a thread would wait for ever
        assert [json.loads(reader.readline())["step"] for _ in range(3)] == [1, 2, 3]
