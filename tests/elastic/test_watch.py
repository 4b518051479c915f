"""Of ranks that say what they do, only a real hang is called one, and it is the right rank's."""

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drumline.elastic import watch as watch_module
from drumline.elastic.watch import Beat, Stacks, Watch
from drumline.parallel.attempt import Attempt

NOW_S = 10_000.0


def beat(phase: str, step: int, *, idle_s: float = 0.0, still_s: float = 0.0) -> Beat:
    return Beat(phase, step, progressed_s=NOW_S - max(idle_s, still_s), ticked_s=NOW_S - still_s)


def judge(beats: dict[int, Beat], *, limit_s: float | None = 5.0) -> tuple[int, bool] | None:
    watch = Watch(limit_s)
    watch._awake_s, watch._looked_s = 0.0, NOW_S
    hang = watch.look(beats, NOW_S)
    return None if hang is None else (hang.rank, hang.frozen)


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ({0: beat("exchange", 7), 1: beat("compute", 7)}, None),
        ({0: beat("exchange", 7, idle_s=9), 1: beat("compute", 7, idle_s=9)}, (1, False)),
        ({0: beat("data", 7, idle_s=9), 1: beat("exchange", 7, idle_s=9)}, (0, False)),
        ({0: beat("save", 8, idle_s=9), 1: beat("exchange", 8, idle_s=9)}, None),  # a checkpoint takes its time
        ({0: beat("save", 8, idle_s=90), 1: beat("exchange", 8, idle_s=90)}, (0, False)),
        ({0: beat("exchange", 8, idle_s=9), 1: beat("compute", 7, idle_s=9)}, (1, False)),
        ({0: beat("exchange", 8, idle_s=7), 1: beat("exchange", 8, idle_s=7)}, None),  # another host's rank may be it
        ({0: beat("exchange", 8, idle_s=9), 1: beat("exchange", 8, idle_s=9)}, (0, False)),
        ({0: beat("exchange", 7, idle_s=9), 1: beat("exchange", 7, still_s=9)}, (1, True)),
        # All wait for rank 0, which works: at its checkpoint, or at what may take as long as it likes.
        ({0: beat("save", 8, idle_s=1), 1: beat("exchange", 8, idle_s=9)}, None),
        ({0: beat("compiling", 7, idle_s=900), 1: beat("exchange", 7, idle_s=9)}, None),
        ({0: beat("starting", 0, still_s=30), 1: beat("starting", 0)}, None),
        ({0: beat("starting", 0, still_s=90), 1: beat("starting", 0)}, (0, True)),
        ({0: beat("ending", 9, idle_s=900), 1: beat("ending", 9, idle_s=900)}, None),
        ({}, None),
    ],
)
def test_the_rank_that_all_others_wait_for_is_the_one_that_hangs(
    beats: dict[int, Beat], expected: tuple[int, bool] | None
) -> None:
    assert judge(beats) == expected


def test_without_a_limit_a_hang_is_many_steps_long_and_a_checkpoint_may_take_longer() -> None:
    assert judge({0: beat("compute", 7, idle_s=50)}, limit_s=None) is None
    assert judge({0: beat("compute", 7, idle_s=70)}, limit_s=None) == (0, False)
    assert judge({0: beat("save", 7, idle_s=70)}, limit_s=None) is None
    watch = Watch(None)
    for step in range(5):
        at_s = time.monotonic() + 30 * step
        watch.look({0: Beat("compute", step, at_s, at_s)}, at_s)
    assert watch.limit_s({}) == pytest.approx(600)


def test_time_in_which_the_whole_machine_stood_still_is_nobodys_hang() -> None:
    watch, now_s = Watch(5.0), time.monotonic()
    assert watch.look({0: Beat("compute", 7, now_s, now_s)}, now_s) is None
    assert watch.look({0: Beat("compute", 7, now_s, now_s)}, now_s + 1000) is None


@pytest.mark.parametrize(
    "outermost", ['File "/bin/drumline", line 8 in <module>', 'File "<frozen runpy>", line 198 in _run_module_as_main']
)
def test_a_stack_is_whole_when_it_ends_in_what_started_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outermost: str
) -> None:
    def show_the_rest(pause_s: float) -> None:
        with (tmp_path / "stack-0").open("a") as file:
            file.write(f"  {outermost}\n")

    monkeypatch.setattr(watch_module, "_STACKS_S", math.inf)
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(sleep=show_the_rest, monotonic=time.monotonic))
    shown = Stacks(Attempt(tmp_path), [0])
    (tmp_path / "stack-0").write_text('Current thread (most recent call first):\n  File "loop.py", line 9 in run\n')
    shown.wait()
    assert shown.read()[0].splitlines()[-1].strip() == outermost and shown.read()[0].count("\n") == 3
