"""How long a run is: as many steps as fit into the time that was asked for, and the same number when it is resumed."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.errors import EXIT_STOPPED, EXIT_USAGE
from drumline.train import length
from drumline.train.loop import Loop
from drumline.train.step import StepResult

Train = Callable[..., int]


@pytest.fixture(autouse=True)
def short_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "_TRIAL_S", 0.1)


def status(run: str) -> dict[str, object]:
    read: dict[str, object] = json.loads(Path(run, "status.json").read_text())
    return read


def test_minutes_give_as_many_steps_as_fit_into_them(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length, "_seconds", lambda setup, step: 0.5)
    monkeypatch.setattr(length, "_EVALUATIONS", 0)
    monkeypatch.setattr(length, "_trial_steps", lambda began_s, setup: range(5))
    monkeypatch.setattr(Loop, "run", lambda loop: pytest.fail(f"{loop.intervals.total_steps} steps"))
    with pytest.raises(pytest.fail.Exception) as chosen:
        train("--minutes", "2", "--run_dir", "run")
    assert 230 <= int(str(chosen.value).split()[0]) <= 240  # 120 s of half a second each, less what was measured


def test_a_resumed_run_keeps_the_steps_that_were_chosen_when_it_began(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "_measured", lambda *measured: 6)
    step = Loop._step

    def stopped_in_the_second(loop: Loop, number: int) -> StepResult:
        if number == 1:
            signal.raise_signal(signal.SIGTERM)
        return step(loop, number)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", stopped_in_the_second)
        assert train("--minutes", "2", "--run_dir", "run") == EXIT_STOPPED
    monkeypatch.setattr(length, "_measured", lambda *measured: pytest.fail("measured again"))
    assert train("--minutes", "2", "--run_dir", "run") == 0
    assert (status("run")["step"], status("run")["total_steps"]) == (6, 6)


def test_a_short_time_still_trains_to_an_end(train: Train) -> None:
    assert train("--minutes", "0.001", "--run_dir", "run") == 0
    assert status("run")["state"] == "finished"


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused(train: Train, capsys: pytest.CaptureFixture[str], minutes: str) -> None:
    assert train("--minutes", minutes, "--run_dir", "run") in (1, EXIT_USAGE)
    assert "minutes" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_long_run_says_early_how_long_it_will_take(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--total_steps", "7", "--run_dir", "quick") == 0
    assert "time " not in capsys.readouterr().out
    monkeypatch.setattr("drumline.train.length._LONG_S", 0.0)
    assert train("--total_steps", "7", "--run_dir", "long") == 0
    assert " for 3 more steps (for a shorter run: --minutes 2)" in capsys.readouterr().out
