"""What ranks say of themselves is read as they meant it, and only a real hang is called one."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drumline.parallel import heartbeat
from drumline.parallel.heartbeat import (
    ATTEMPT,
    Beat,
    Pulse,
    Stacks,
    Watch,
    read_pulse,
    read_run_dir,
    tell_run_dir,
    under_torchrun,
)

NOW_S = 10_000.0


def beat(phase: str, step: int, *, idle_s: float = 0.0, still_s: float = 0.0) -> Beat:
    return Beat(phase, step, progressed_s=NOW_S - max(idle_s, still_s), ticked_s=NOW_S - still_s)


def judge(beats: dict[int, Beat], *, limit_s: float | None = 5.0) -> tuple[int, bool] | None:
    watch = Watch(limit_s)
    watch._awake_s, watch._looked_s = 0.0, NOW_S
    hang = watch.look(beats, NOW_S)
    return None if hang is None else (hang.rank, hang.frozen)


def test_a_pulse_is_read_as_it_was_written_and_ticks_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    assert read_pulse(tmp_path, 3) is None
    pulse = Pulse.start()
    try:
        pulse.at("compute", 12_345_678_901)
        first = read_pulse(tmp_path, 3)
        assert first is not None and (first.phase, first.step) == ("compute", 12_345_678_901)
        while (later := read_pulse(tmp_path, 3)) is not None and later.ticked_s == first.ticked_s:
            time.sleep(0.01)
        assert later is not None and later.progressed_s == first.progressed_s
    finally:
        pulse.stop()
    assert read_pulse(tmp_path, 3).phase == "ending"  # type: ignore[union-attr]


def test_a_process_that_nobody_supervises_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTEMPT, raising=False)
    monkeypatch.chdir(tmp_path)
    pulse = Pulse.start()
    pulse.at("compute", 1)
    pulse.stop()
    tell_run_dir(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_run_folder_that_rank_0_chose_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    assert read_run_dir(tmp_path) is None
    tell_run_dir(tmp_path / "run")
    assert read_run_dir(tmp_path) == tmp_path / "run"


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


def test_under_torchrun_a_rank_dies_with_it_and_says_what_torchrun_leaves_open() -> None:
    assert under_torchrun({"RANK": "0"}) == []
    assert under_torchrun({"TORCHELASTIC_RUN_ID": "1", ATTEMPT: "/x"}) == []
    code = "from drumline.parallel.heartbeat import under_torchrun; print(under_torchrun(), flush=True); input()"
    agent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {code!r}]))"
    variables = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_MAX_RESTARTS": "3", "SLURM_JOB_ID": "7"}
    variables |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}  # a launcher in this very process sets it
    with subprocess.Popen(
        [sys.executable, "-c", agent],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in said and "--signals-to-handle" in said
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == ""  # the pipe closes when the last one that has it is gone


@pytest.mark.parametrize(
    "outermost", ['File "/bin/drumline", line 8 in <module>', 'File "<frozen runpy>", line 198 in _run_module_as_main']
)
def test_a_stack_is_whole_when_it_ends_in_what_started_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outermost: str
) -> None:
    def show_the_rest(pause_s: float) -> None:
        with (tmp_path / "stack-0").open("a") as file:
            file.write(f"  {outermost}\n")

    monkeypatch.setattr(heartbeat, "_STACKS_S", math.inf)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(sleep=show_the_rest, monotonic=time.monotonic))
    shown = Stacks(tmp_path, [0])
    (tmp_path / "stack-0").write_text('Current thread (most recent call first):\n  File "loop.py", line 9 in run\n')
    shown.wait()
    assert shown.read()[0].splitlines()[-1].strip() == outermost and shown.read()[0].count("\n") == 3
