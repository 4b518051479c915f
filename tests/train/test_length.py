"""How long a run is: as many steps as fit into the time that was asked for, and the same number when it is resumed."""

import json
import signal
from collections.abc import Callable, Iterable
from itertools import chain, cycle, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.config import BatchConfig, TrainConfig
from drumline.errors import EXIT_STOPPED, EXIT_USAGE
from drumline.files import RunFolder, stored_config
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


class Clock:
    """Time that passes only with the work of a trial."""

    def __init__(self, *, steps_s: Iterable[float], window_s: float) -> None:
        self.now_s, self._steps_s, self._window_s = 0.0, iter(steps_s), window_s

    def perf_counter(self) -> float:
        return self.now_s

    def train(self, setup: object, step: int) -> None:
        self.now_s += next(self._steps_s)

    def evaluator(self, config: TrainConfig, setup: object) -> Callable[[object], dict[str, float]]:
        def evaluate(pulse: object) -> dict[str, float]:
            self.now_s += self._window_s * config.run.eval_windows
            return {}

        return evaluate


def chosen(
    monkeypatch: pytest.MonkeyPatch, *, steps_s: Iterable[float], window_s: float = 0.0, minutes: float = 2.0
) -> tuple[int, int]:
    """Steps and validation sequences, by a machine that takes this long for steps and each of the sequences."""
    clock = Clock(steps_s=steps_s, window_s=window_s)
    monkeypatch.setattr(length, "time", clock)
    monkeypatch.setattr(length, "_train", clock.train)
    monkeypatch.setattr(length, "_TRIAL_S", 4.0)
    setup: Any = SimpleNamespace(initialize=None, world=SimpleNamespace(on_rank0=lambda function: function(), size=1))
    config = TrainConfig(batch=BatchConfig(minutes=minutes, batch_size=8))
    return length._measured(config, setup, clock.evaluator)


def test_minutes_give_as_many_steps_as_fit_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, windows = chosen(monkeypatch, steps_s=repeat(0.5))
    assert 225 <= steps <= 240 and windows == 128  # 120 s of half a second each, less what was measured


def test_the_first_steps_and_single_slow_ones_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, _ = chosen(monkeypatch, steps_s=chain([20.0, 3.0], cycle([0.5, 0.5, 2.0, 0.5, 0.4])))
    assert 180 <= steps <= 200  # (120 - 20 - 3 - 4) / 0.5, or so
    steps, _ = chosen(monkeypatch, steps_s=chain([90.0], repeat(0.5)))
    assert steps == 120  # a first step that compiles for long leaves half of the time


def test_slow_evaluations_become_smaller_and_leave_the_time_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, windows = chosen(monkeypatch, steps_s=repeat(0.5), window_s=0.06)  # 7.7 s for all 128, as by a busy machine
    assert 190 <= steps <= 220 and windows == 18
    steps, windows = chosen(monkeypatch, steps_s=repeat(3.0), window_s=1.0, minutes=1)
    assert steps == 11 and windows == 8  # no less than a batch


def test_steps_that_are_too_slow_end_the_trial_early_and_are_said_to_be_few(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        steps, _ = chosen(patch, steps_s=repeat(5.0), minutes=1)
    assert steps == 9  # three were measured
    monkeypatch.setattr(length, "_measured", lambda *trial: (2, 4))
    assert train("--minutes", "1", "--run_dir", "run") == 0
    assert "warning: 2 steps in 1 minute is too short to learn much: use more --minutes" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_steps_that_were_chosen_when_it_began(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "_measured", lambda *measured: (6, 2))
    step = Loop._step

    def stopped_in_the_second(loop: Loop, number: int) -> StepResult:
        if number == 1:
            signal.raise_signal(signal.SIGTERM)
        return step(loop, number)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", stopped_in_the_second)
        assert train("--minutes", "2", "--run_dir", "run", "--eval_windows", "128") == EXIT_STOPPED
    monkeypatch.setattr(length, "_measured", lambda *measured: pytest.fail("measured again"))
    assert train("--minutes", "2", "--run_dir", "run", "--eval_windows", "128") == 0
    assert (status("run")["step"], status("run")["total_steps"]) == (6, 6)
    stored = stored_config(RunFolder(Path("run")))
    assert stored is not None and stored.run.eval_windows == 2


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
