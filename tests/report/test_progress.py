"""A long job says how much is done of how much and when it will end; a short one says nothing."""

import sys

import pytest
from helpers.terminal import on_terminal

from drumline.report import progress
from drumline.report.progress import progress_of


def test_a_short_job_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_of("evaluating", total=3) as piece_done:
        for _ in range(3):
            piece_done()
    assert capsys.readouterr() == ("", "")


def test_a_long_one_says_how_much_is_done_of_how_much_and_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter(range(0, 100_000, 10))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now_s))
    with progress_of("evaluating", total=2000) as piece_done:
        for _ in range(1000):
            piece_done()
    said = capsys.readouterr()
    assert said.out == "" and said.err.splitlines()[-1] == "evaluating 1,000 of 2,000, 50%, 2h46m left"


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end() -> None:
    code = (
        "from drumline.report.progress import progress_of\n"
        "with progress_of('evaluating', total=2) as done:\n"
        "    done()\n"
        "    done()\n"
        "print('the result')\n"
    )
    shown, said = on_terminal([sys.executable, "-c", code], stream="stderr")
    assert "2/2" in shown and said == "the result\n"
