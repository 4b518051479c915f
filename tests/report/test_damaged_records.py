"""A metrics.jsonl or status.json that was torn or edited: it is told, kept beside, and never a reason to stop."""

import json
import sys
from pathlib import Path

import pytest
from helpers.small import small
from helpers.warm import run_warm

from drumline.files.run_folder import RunFolder
from drumline.report.plots import plot_curves
from drumline.report.records import read_metrics
from drumline.report.rewinding import forget_after
from drumline.report.runs import list_runs

DAMAGED = {
    "no step": b'{"loss": 3.5}',
    "a step that is no number": b'{"step": "two", "loss": 3.5}',
    "a list": b'[{"step": 2}]',
    "a number": b"12",
    "no JSON": b'{"step": 2, "lo{"step": 3, "loss": 3.5}',
    "NUL bytes": bytes(64),
    "invalid UTF-8": b'{"step": 2, "text": "\xff\xfe"}',
    "brackets without end": b"[" * 100_000,
    "an empty line": b"",
}


def drumline(*words: str, cwd: Path) -> tuple[int, str]:
    """The exit code of a command, and all that it printed."""
    done = run_warm([sys.executable, "-m", "drumline", *words], timeout=120, cwd=cwd)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_is_set_aside_and_named_and_every_reader_copes(tmp_path: Path, line: bytes) -> None:
    folder, said = RunFolder(tmp_path / "run"), list[str]()
    folder.path.mkdir()
    folder.config.touch()
    good = [json.dumps({"step": step, "loss": 1.0}).encode() for step in (1, 2, 3)]
    folder.metrics.write_bytes(b"\n".join([good[0], line, *good[1:]]) + b"\n")
    assert [record["step"] for record in read_metrics(folder.metrics)] == [1, 2, 3]
    assert [row["step"] for row in list_runs(tmp_path)] == [3]
    plot_curves(folder.metrics, folder.path / "loss.png", title="damaged")
    for _ in range(2):
        forget_after(folder.metrics, 2, warn=said.append)
    assert folder.metrics.read_bytes() == b"\n".join(good[:2]) + b"\n"
    aside = folder.path / "metrics.jsonl.damaged"
    assert aside.read_bytes() == line + b"\n"
    assert said == [f"warning: line 2 of {folder.metrics} is damaged and was moved to {aside}"]


def test_many_damaged_lines_are_one_warning(tmp_path: Path) -> None:
    file, said = tmp_path / "metrics.jsonl", list[str]()
    file.write_bytes(b"x\n" * 30 + b'{"step": 1}\n' + b"y\n")
    forget_after(file, 1, warn=said.append)
    assert said == [f"warning: lines 1, 2, 3, 4, 5 and 26 more of {file} are damaged and were moved to {file}.damaged"]
    assert file.read_text() == '{"step": 1}\n'


def test_what_is_no_number_is_not_shown(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.touch()
    folder.metrics.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": "high", "valid_loss": [1], "lr": {}}\n')
    folder.status.write_text('{"state": "running", "step": "two", "total_steps": null, "pid": "x", "host": 1}')
    plot_curves(folder.metrics, folder.path / "loss.png", title="edited")
    code, said = drumline("runs", ".", cwd=tmp_path)
    assert code == 0 and "2/?  2.5000" in said, said


def test_a_metrics_file_that_is_none_is_no_reason_to_stop(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.metrics.mkdir(parents=True)
    folder.config.touch()
    assert [row["step"] for row in list_runs(tmp_path)] == [0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_records_are_damaged_goes_on(here: Path, ranks: int) -> None:
    flags = small("--train_data_path", "text", "--run_dir", "run", "--total_steps", "4", "--save_every", "2")
    flags += ["--nproc", str(ranks)] if ranks > 1 else []
    code, said = drumline("train", *flags, cwd=here)
    assert code == 0, said
    folder = RunFolder(here / "run")
    lines = folder.metrics.read_bytes().splitlines()
    folder.metrics.write_bytes(b"\n".join([lines[0], *DAMAGED.values(), *lines[1:]]) + b"\n")
    folder.events.write_bytes(b"\x00\xff not an event\n" + folder.events.read_bytes())
    more = ["--total_steps", "6", "--allow_change", "total_steps"]
    code, said = drumline("train", *flags, *more, cwd=here)
    assert code == 0 and said.count("warning") == 1, said
    assert "warning: lines 2, 3, 4, 5, 6 and 4 more of run/metrics.jsonl are damaged" in said
    assert [record["step"] for record in read_metrics(folder.metrics) if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert len((here / "run/metrics.jsonl.damaged").read_bytes().splitlines()) == len(DAMAGED)
    assert folder.read_status()["state"] == "finished"
