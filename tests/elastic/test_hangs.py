"""A rank that stands still, or leaves early, is the one that is named: with where it is and what the others wait in."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.elastic import diagnosis
from drumline.elastic.diagnosis import Cause, End, blame, cause_of_another_host, first_cause, hang_cause
from drumline.elastic.supervisor import Supervisor
from drumline.elastic.watch import Beat, Hang, Stacks, Watch
from drumline.errors import EXIT_STOPPED
from drumline.parallel.attempt import Attempt
from drumline.parallel.supervised import SupervisedPulse
from drumline.rendezvous.joining import Change, Rendezvous

TIMEOUT_S = 240
NOW_S = 10_000.0
GRADIENTS = "the sum of the gradients"
RANK_PROCESS = Path(diagnosis.__file__).with_name("rank_process.py")
TORCH = "/venv/lib/python3.11/site-packages/torch"


def shown(*frames: str) -> str:
    """A stack as faulthandler shows it, from "file:line function" frames, innermost first, beside an idle thread."""
    lines = []
    for frame in (*frames, f"{RANK_PROCESS}:140 _outcome", "<string>:1 <module>"):
        place, function = frame.split(" ")
        path, line = place.rsplit(":", 1)
        lines.append(f'  File "{path}", line {line} in {function}\n')
    idle = '  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 81 in _worker\n'
    return (
        f"Thread 0x1 (most recent call first):\n{idle}\nCurrent thread 0x2 (most recent call first):\n{''.join(lines)}"
    )


LOOP = shown("/home/me/data.py:7 forever", "/src/drumline/loop.py:180 _micro_batches")
IN_BACKWARD = shown(
    f"{TORCH}/autograd/graph.py:979 _engine_run_backward",
    f"{TORCH}/_tensor.py:623 backward",
    "/src/drumline/train/step.py:97 __call__",
)
IN_BARRIER = shown(f"{TORCH}/distributed/distributed_c10d.py:5 barrier", "/home/me/mine.py:9 meet")
IN_STATISTICS = shown(
    f"{TORCH}/nn/parallel/distributed.py:2100 _distributed_broadcast_coalesced",
    f"{TORCH}/nn/parallel/distributed.py:1890 forward",
    "/src/drumline/train/step.py:58 loss",
)


@pytest.mark.parametrize("stack", [IN_BACKWARD, LOOP, ""])
@pytest.mark.parametrize("mangled", [False, True])
def test_what_a_rank_waits_in_is_what_it_says_whatever_functions_are_called(stack: str, mangled: bool) -> None:
    if mangled:
        stack = re.sub(r" in \S+$", " in renamed", stack, flags=re.MULTILINE)
    ends = [End(0, 10, None, 12, phase="exchange", waits_for=GRADIENTS), End(1, 11, None, 12, phase="data")]
    hang = Hang(1, "data", 12, 2.0, frozen=False)
    (other,) = hang_cause(hang, ends, stopped=False, stacks={0: stack, 1: LOOP}).others
    assert other == "rank 0 (process 10) waits in the sum of the gradients at step 12"


@pytest.mark.parametrize(
    ("stack", "other"),
    [
        (IN_BARRIER, "waits in barrier (mine.py:9) at step 12"),
        (IN_STATISTICS, "waits in _distributed_broadcast_coalesced (step.py:58) at step 12"),
        (IN_BACKWARD, "was still running at step 12, in __call__ (step.py:97)"),  # its own part of backward
        (LOOP, "was still running at step 12, in forever (data.py:7)"),
    ],
)
def test_code_that_does_not_say_what_it_waits_for_waits_in_a_call_of_torch_distributed(stack: str, other: str) -> None:
    ends = [End(0, 10, None, 12, phase="data"), End(1, 11, None, 12, phase="data")]
    cause = hang_cause(Hang(1, "data", 12, 2.0, frozen=False), ends, stopped=False, stacks={0: stack, 1: LOOP})
    assert cause.others == (f"rank 0 (process 10) {other}",)


def test_of_ranks_that_came_equally_far_the_one_that_does_not_wait_is_named() -> None:
    ends = [End(rank, 10 + rank, None, 12, phase="exchange", waits_for=GRADIENTS) for rank in range(3)]
    hang, busy = Hang(0, "exchange", 12, 9.0, frozen=False), shown("/home/me/optim.py:3 step")
    blamed = blame(hang, [ends[0], replace(ends[1], waits_for=""), ends[2]], {1: busy})
    assert blamed is not None and blamed.rank == 1
    assert blame(hang, ends, {}) is None
    cause = hang_cause(hang, ends, stopped=False, stacks={}, all_wait=True)
    assert cause.line.endswith(
        "was waiting, like all ranks here, for 9 s in exchange at step 12, in the sum of the gradients"
    )


def test_the_report_has_the_rank_its_place_and_every_stack_without_idle_threads() -> None:
    ends = [End(0, 10, None, 12, phase="exchange", waits_for=GRADIENTS), End(1, 11, None, 12, phase="data")]
    hang = Hang(1, "data", 12, 61.0, frozen=False)
    cause = hang_cause(hang, ends, stopped=False, stacks={0: IN_BACKWARD, 1: LOOP})
    assert cause.line.startswith("rank 1 on ") and cause.line.endswith(
        "(process 11) was without progress for 61 s in data at step 12, in forever (data.py:7)"
    )
    assert cause.details[0].startswith("rank 0 (process 10) waits in the sum of the gradients")
    report = "\n".join(cause.details)
    assert "rank 0:\n" in report and "rank 1:\n" in report and " in forever" in report
    assert "_worker" not in report and "rank_process.py" not in report


def test_a_rank_that_exits_early_is_the_cause_and_not_those_that_lost_it() -> None:
    lost = {"exception": "Connection closed by peer", "traceback": "", "time": 5.0, "host": "here"}
    ends = [End(0, 10, 70, 12, lost, "exchange"), End(1, 11, 0, 12, None, "data")]
    cause = first_cause(ends)
    assert cause.line.endswith("(process 11) exited with code 0 at step 12 before the end of the run")
    assert cause.others == ("rank 0 (process 10) lost its connection at step 12",)
    assert not End(1, 11, 0, 12, None, "ending").is_early
    assert not End(1, 11, 0, None, None, "starting").is_early  # a function that does not train may end when it likes
    assert End(1, 11, 0, None, None, "starting", to_end=True).is_early


def test_a_host_whose_ranks_lost_their_peer_adds_what_they_waited_in() -> None:
    hang = Hang(1, "data", 12, 2.0, frozen=False)
    hang_report = hang_cause(hang, [End(1, 11, None, 12, phase="data")], stopped=False, stacks={1: LOOP}).as_dict()
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/src/drumline/step.py", line 97, in __call__\n    scaled.backward()\n'
        f'  File "{TORCH}/autograd/graph.py", line 979, in _engine_run_backward\n    return run_backward(\n'
        "RuntimeError: Connection closed by peer"
    )
    lost = {"exception": "RuntimeError: Connection closed by peer", "traceback": trace, "time": 5.0, "host": "here"}
    cause = cause_of_another_host(
        {**hang_report, "others": list(hang_report["others"])}, [End(0, 10, 70, 12, lost, "exchange", GRADIENTS)]
    )
    assert cause.rank == 1 and " in forever" in cause.trace and trace in cause.trace
    assert cause.others[-1].endswith(
        "rank 0 (process 10) lost its connection at step 12, waiting in the sum of the gradients"
    )


def limit_after(step_s: float, phase: str) -> float:
    """The limit once five steps of that length are done, while a rank is in a phase."""
    watch, start_s = Watch(None), time.monotonic()
    for step in range(6):
        now_s = start_s + step_s * step
        watch.look({0: Beat("compute", step, now_s, now_s)}, now_s)
    return watch.limit_s({0: Beat(phase, 6, 0.0, 0.0)})


@pytest.mark.parametrize(
    ("step_s", "phase", "limit_s"),
    [
        (0.5, "compute", 60.0),
        (3.0, "data", 60.0),
        (10.0, "exchange", 200.0),
        (10.0, "evaluate", 2000.0),
        (0.5, "save", 600.0),
    ],
)
def test_the_limit_follows_the_median_step_and_evaluating_and_saving_may_take_longer(
    step_s: float, phase: str, limit_s: float
) -> None:
    assert limit_after(step_s, phase) == pytest.approx(limit_s)


def test_a_slow_step_now_and_then_does_not_move_the_limit_and_compiling_has_none() -> None:
    watch, now_s = Watch(None), time.monotonic()
    for step, took_s in enumerate([5.0, 5.0, 500.0, 5.0, 5.0, 5.0]):
        now_s += took_s
        watch.look({0: Beat("compute", step, now_s, now_s)}, now_s)
    assert watch.limit_s({}) == pytest.approx(100.0)
    for phase in ("starting", "compiling", "ending"):
        watch = Watch(None)
        watch._awake_s, watch._looked_s = 0.0, NOW_S
        assert watch.look({0: Beat(phase, 6, NOW_S - 9000, NOW_S)}, NOW_S) is None


def test_ranks_that_wait_for_one_in_the_same_phase_that_gets_on_do_not_hang() -> None:
    watch = Watch(5.0)
    watch._awake_s, watch._looked_s = 0.0, NOW_S
    beats = {0: Beat("evaluate", 6, NOW_S - 9, NOW_S), 1: Beat("evaluate", 6, NOW_S - 1, NOW_S)}
    assert watch.look(beats, NOW_S) is None
    watch._looked_s = NOW_S + 60
    beats = {rank: Beat("evaluate", 6, beat.progressed_s, NOW_S + 60) for rank, beat in beats.items()}
    assert watch.look(beats, NOW_S + 60) is not None


class FakeRanks:
    """Ranks whose stacks and exit codes are given."""

    def __init__(self, folder: Path, codes: dict[int, int | None], stacks: dict[int, str]) -> None:
        self._folder, self._codes, self._stacks = folder, codes, stacks
        self.killed = False

    def codes(self) -> dict[int, int | None]:
        return self._codes

    def pid(self, rank: int) -> int:
        return os.getpid()

    def send(self, signum: signal.Signals) -> None:
        for rank, stack in self._stacks.items():
            with (self._folder / f"stack-{rank}").open("a") as file:
                file.write(stack)

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def supervisor(tmp_path: Path) -> Callable[..., tuple[Supervisor, FakeRanks]]:
    def make(
        phases: dict[int, str], codes: dict[int, int | None], stacks: dict[int, str], waits_for: Sequence[str] = ()
    ) -> Any:
        made = Supervisor(print, Rendezvous(), nproc=len(codes), max_restarts=0, limit_s=5.0)
        ranks: Any = FakeRanks(tmp_path, codes, stacks)
        made._attempt, made._ranks = Attempt(tmp_path), ranks
        for rank, phase in phases.items():
            pulse = SupervisedPulse(tmp_path)
            pulse.start(rank)
            pulse._ended.set()
            pulse.at(phase, 12, waits_for=waits_for[rank] if waits_for else "")
        return made, ranks

    return make


def test_a_host_whose_ranks_all_wait_leaves_it_to_another_to_name_the_rank_for_a_while(
    supervisor: Callable[..., tuple[Supervisor, FakeRanks]],
) -> None:
    phases, run = {0: "exchange", 1: "exchange"}, {0: None, 1: None}
    waiting, ranks = supervisor(phases, run, {0: IN_BACKWARD, 1: IN_BACKWARD}, waits_for=[GRADIENTS, GRADIENTS])
    waiting._other_hosts = True
    hang = Hang(0, "exchange", 12, 9.0, frozen=False)
    assert waiting._name(hang) is None and not ranks.killed
    while (cause := waiting._name(hang)) is None:
        assert not ranks.killed
    assert ranks.killed and "waiting, like all ranks here" in cause.line

    alone, ranks = supervisor(phases, run, {0: IN_BACKWARD, 1: LOOP}, waits_for=[GRADIENTS, ""])
    cause = alone._name(hang)
    assert isinstance(cause, Cause) and cause.rank == 1 and ranks.killed


class CutOff(Rendezvous):
    """Whose host leaves while the ranks here still save."""

    def __init__(self, ranks: FakeRanks) -> None:
        super().__init__()
        self._ranks, self._asked = ranks, 0

    def change(self) -> Change:
        self._asked += 1
        if self._asked == 3:
            self._ranks._codes[0] = EXIT_STOPPED
        return "cut off"


def test_ranks_that_save_to_stop_outlive_the_host_of_the_rendezvous(
    supervisor: Callable[..., tuple[Any, FakeRanks]],
) -> None:
    for stops, ends in [([signal.SIGTERM], EXIT_STOPPED), ([], None)]:
        made, ranks = supervisor({0: "save"}, {0: None}, {})
        made._rendezvous, made._stops = CutOff(ranks), stops
        assert made._until_the_attempt_ends() == ends


def test_a_host_whose_only_rank_exits_early_has_not_succeeded(
    supervisor: Callable[..., tuple[Supervisor, FakeRanks]], tmp_path: Path
) -> None:
    early, _ = supervisor({1: "data"}, {1: 0}, {})
    cause = early._until_the_attempt_ends()
    assert isinstance(cause, Cause) and cause.line.endswith("exited with code 0 at step 12 before the end of the run")
    done, _ = supervisor({1: "ending"}, {1: 0}, {})
    assert done._until_the_attempt_ends() == 0
    starting, _ = supervisor({1: "starting"}, {1: 0}, {})
    assert starting._until_the_attempt_ends() == 0
    SupervisedPulse(tmp_path).promise_an_ending()
    assert isinstance(starting._until_the_attempt_ends(), Cause)


def test_only_what_is_shown_after_it_was_asked_for_is_read(tmp_path: Path) -> None:
    (tmp_path / "stack-0").write_text(LOOP)
    stacks = Stacks(Attempt(tmp_path), [0, 1])
    assert stacks.read() == {0: "", 1: ""}
    with (tmp_path / "stack-0").open("a") as file:
        file.write(IN_BACKWARD)
    stacks.wait(but=1)
    assert stacks.read() == {0: IN_BACKWARD, 1: ""}
