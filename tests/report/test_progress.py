"""A long job says how much is done of how much and when it will end; a short one says nothing."""

import os
import pty
import subprocess
import sys

import pytest

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
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=environ, check=True)
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"2/2" in shown and done.stdout == b"the result\n"
