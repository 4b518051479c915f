"""How far preparing text is: a total, a percentage and a time left, in lines and on a terminal."""

import gzip
import io
import re
import sys
from pathlib import Path

import pytest

from drumline.cli.prepare import prepared_lines
from drumline.data import Corpus, Recipe, prepare
from drumline.data import preparing as preparing_module
from drumline.data.preparing import Progress
from drumline.report import preparation, preparing

MB = 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the test sets."""
    now = [100.0]
    monkeypatch.setattr(preparation.time, "perf_counter", lambda: now[0])
    return now


def lines_for(clock: list[float], *reports: tuple[float, Progress]) -> None:
    with preparing() as show:
        for seconds, progress in reports:
            clock[0] = 100.0 + seconds
            show(progress)


def test_lines_have_a_total_a_percentage_and_a_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines_for(
        clock,
        (0, Progress("encoding", 0, 600 * MB, 0)),
        (1, Progress("encoding", 6 * MB, 600 * MB, 20 * MB)),  # too soon for another line
        (100, Progress("encoding", 150 * MB, 600 * MB, 500 * MB)),
    )
    assert capsys.readouterr().out.splitlines() == [
        "encoding 0.0 of 600.0 MB, 0%",
        "encoding 150.0 of 600.0 MB, 25%, 5.0 MB/s of text, 5m00s left",
    ]


def test_a_source_of_unknown_size_shows_what_is_known(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    lines_for(clock, (0, Progress("encoding", 0, None, 0)), (10, Progress("encoding", 0, None, 20 * MB)))
    assert capsys.readouterr().out.splitlines()[1] == "encoding, 20.0 MB of text, 2.0 MB/s of text"


def test_learning_shows_how_much_was_counted_and_when_pairs_are_merged(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines_for(
        clock,
        (0, Progress("reading", 0, 32 * MB, 0)),
        (1, Progress("learning", 0, 32 * MB, 0)),
        (7, Progress("learning", 8 * MB, 32 * MB, 8 * MB)),
        (8, Progress("learning", 32 * MB, 32 * MB, 32 * MB)),
    )
    assert capsys.readouterr().out.splitlines() == [
        "reading text 0.0 of 32.0 MB, 0%",
        "training the tokenizer 0.0 of 32.0 MB, 0%",
        "training the tokenizer 8.0 of 32.0 MB, 25%, 1.3 MB/s of text, 18s left",
        "training the tokenizer: merging pairs, 32.0 MB of text",
    ]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_every_stage_of_a_real_source_is_counted_to_its_end(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing_module, "BATCH_BYTES", 1000)
    monkeypatch.setattr(preparing_module, "REPORT_BYTES", 1000)
    monkeypatch.setattr(preparing_module, "SAMPLE_BYTES", 20_000)
    source, out = tmp_path / "text", tmp_path / "out"
    source.mkdir()
    for number in range(60):
        text = "".join(f"line {number} of {line * 7919}\n" for line in range(100)).encode()
        (source / f"{number}{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    reports: list[Progress] = []
    made = prepare(Recipe(Corpus(str(source)), vocab_size=300), out, progress=reports.append)
    for stage in ("reading", "learning", "encoding"):
        counts = [(report.bytes_done, report.bytes_total or 0) for report in reports if report.stage == stage]
        assert len(counts) > 5 and counts[0][0] == 0
        assert counts == sorted(counts, key=lambda count: count[0])
        assert all(0 <= done <= total for done, total in counts)
        assert counts[-1][0] > 0.8 * counts[-1][1] > 0
    assert reports[-1].bytes_done == reports[-1].bytes_total == sum(path.stat().st_size for path in source.iterdir())
    assert prepared_lines(made)[0].startswith(f"{out}: ")


def test_a_terminal_shows_bars_that_vanish_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    with preparing() as show:
        show(Progress("reading", 0, 32 * MB, 0))
        show(Progress("learning", 16 * MB, 32 * MB, 16 * MB))
        show(Progress("learning", 32 * MB, 32 * MB, 32 * MB))
        show(Progress("encoding", 150 * MB, 600 * MB, 150 * MB))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.getvalue())
    assert "100% training the tokenizer " in plain and "100% merging pairs" in plain
    assert "100% training the tokenizer: merging" not in plain  # nobody knows how far that is
    assert "100% reading text" in plain and "25% encoding 150.0 of 600.0 MB" in plain
    assert shown.getvalue().count("\x1b[1A\x1b[2K") >= 2 and shown.getvalue().endswith("\x1b[2K")


def test_a_terminal_shows_no_bar_where_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    with preparing():
        pass
    assert shown.getvalue() == ""
