"""A step's gradient that is started before the numbers of the step before it are read changes nothing about a run."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.poisoned import events, fit, sample_of, steps
from helpers.small import small

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.train.loop import Loop
from drumline.train.step import Backward, Votes

PLAIN: dict[str, Any] = {"bitwise": False, "batch_size": 12}


def both_ways(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """The same run with and without looking ahead; it must be the same to the bit."""
    ends = []
    for ahead in (False, True):
        monkeypatch.setattr(Backward, "runs_ahead", ahead)
        ends.append(fit(f"{ahead}", **PLAIN, **settings))
    assert ends[0] == ends[1] and steps("True") == steps("False")


def test_a_step_is_started_before_the_numbers_of_the_one_before_are_judged(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backward, "runs_ahead", True)
    order: list[str] = []
    for name in ("_gradient", "_judged"):
        kept = getattr(Loop, name)

        def noted(self: Loop, step: int, *more: Any, kept: Any = kept, name: str = name, **others: Any) -> Any:
            order.append(f"{name} {step}")
            return kept(self, step, *more, **others)

        monkeypatch.setattr(Loop, name, noted)
    fit("run", steps=3, **PLAIN)
    assert order == ["_gradient 0", "_gradient 1", "_judged 0", "_gradient 2", "_judged 1", "_judged 2"]


def test_a_run_with_evaluations_and_saves_ends_with_the_same_bits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = set()
    for ahead in (False, True):
        monkeypatch.setattr(Backward, "runs_ahead", ahead)
        flags = "--total_steps 9 --eval_every 2 --save_every 3 --dropout 0.1 --batch_size 2 --global_batch_size 4"
        command = ["train", "--train_data_path", "text", "--run_dir", f"{ahead}", *small(*flags.split())]
        assert run_command(command) == 0
        fingerprints.add(RunFolder(Path(f"{ahead}")).read_status()["weights_sha256"])
    assert len(fingerprints) == 1


def test_a_step_that_is_not_finite_is_skipped_and_the_next_computed_from_the_same_weights(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both_ways(monkeypatch, poison={sample_of(3, **PLAIN): math.nan}, on_nonfinite="skip", steps=6)
    assert [event["step"] for event in events("True", "skipped")] == [3]


def test_a_rollback_leaves_out_the_same_data(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways(monkeypatch, poison={sample_of(4, **PLAIN): math.nan}, on_nonfinite="rollback", steps=7)
    (event,) = events("True", "rollback")
    assert (event["step"], event["to"]) == (4, 2)


def test_a_run_that_is_asked_to_stop_stops_after_that_step_and_goes_on_to_the_same_bits(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = fit("whole", steps=8, **PLAIN)
    monkeypatch.setattr(Backward, "runs_ahead", True)
    judge = Loop._judged

    def asked(self: Loop, step: int, *more: Any) -> Any:
        if step == 2 and not Path("asked").exists():
            Path("asked").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return judge(self, step, *more)

    monkeypatch.setattr(Loop, "_judged", asked)
    stopped = fit("run", steps=8, **PLAIN)
    assert stopped.state == "stopped" and stopped.step == 4  # the fourth step was under way
    assert fit("run", steps=8, **PLAIN).weights_sha256 == whole.weights_sha256


def test_data_that_cannot_be_read_for_the_next_step_do_not_cost_the_one_before(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backward, "runs_ahead", True)
    gradient = Loop._gradient

    def broken(self: Loop, step: int, votes: Votes) -> Any:
        if step == 3:
            raise OSError("no such sample")
        return gradient(self, step, votes)

    monkeypatch.setattr(Loop, "_gradient", broken)
    with pytest.raises(OSError, match="no such sample"):
        fit("run", steps=8, **PLAIN)
    assert steps("run") == [1, 2, 3]
