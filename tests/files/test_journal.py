"""The journal of a run: every event once and in order, one status, and a disk that refuses stops nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.files import disk
from drumline.files.journal import Journal
from drumline.files.run_folder import RunFolder
from drumline.report.records import Records


def at_once(what: str, write: Callable[[], object]) -> None:
    write()


def events(folder: RunFolder) -> list[dict[str, object]]:
    return [json.loads(line) for line in folder.events.read_text().splitlines()]


def test_events_are_lines_with_their_facts_and_the_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    journal = Journal(folder, attempt=at_once)
    journal.event("saved", step=4, bytes=100)
    journal.event("rollback", step=9, to=4, name="any fact")
    first, second = events(folder)
    assert list(first) == ["event", "step", "bytes", "time"] and first["event"] == "saved" and first["step"] == 4
    assert second["event"] == "rollback" and second["name"] == "any fact"


def test_the_status_is_the_last_one_written_and_the_journal_knows_whether_it_wrote_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status("failed", step=3, total_steps=8, cause="of an earlier process")
    journal = Journal(folder, attempt=at_once)
    assert journal.step is None
    journal.status("running", step=3, total_steps=8)
    journal.status("finished", step=8, total_steps=8, weights_sha256="abc")
    status = folder.read_status()
    assert journal.step == 8 and "cause" not in status
    assert (status["state"], status["step"], status["weights_sha256"]) == ("finished", 8, "abc")


def test_ranks_other_than_0_write_nothing(tmp_path: Path) -> None:
    journal = Journal(RunFolder(tmp_path), attempt=at_once, writes=False)
    journal.event("saved", step=4)
    journal.status("running", step=4, total_steps=8)
    assert journal.step is None and list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_reported_once_and_no_event_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    records = Records([], log=None)
    journal = Journal(folder, attempt=records.later)
    for step in (1, 2):  # there is no folder yet
        journal.event("saved", step=step)
        journal.status("running", step=step, total_steps=3)
        assert not records.flush()
    said = capsys.readouterr().out
    assert said.count("events.jsonl (No such file") == said.count("status.json (No such file") == 1
    folder.path.mkdir()
    journal.event("saved", step=3)
    journal.status("finished", step=3, total_steps=3)
    assert records.flush()
    assert [event["step"] for event in events(folder)] == [1, 2, 3, 3] and folder.read_status()["step"] == 3
    assert capsys.readouterr().out.count("is writable again") == 2

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(disk, "flush", full)
    journal.status("failed", step=3, total_steps=3)
    assert not records.flush()
    assert folder.read_status()["state"] == "finished"
