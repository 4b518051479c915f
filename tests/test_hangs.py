"""A rank that stands still, or leaves early, is the one that is named: with where it is and what the others wait in."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import small
from hosts import Host, two_hosts
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState

from drumline.causes import Cause, End, blame, first_cause, hang_cause, told_by_another
from drumline.heartbeat import ATTEMPT, Beat, Hang, Pulse, Stacks, Watch, promise_an_ending
from drumline.meeting import Meeting
from drumline.supervisor import Supervisor

TIMEOUT_S = 240
NOW_S = 10_000.0
TORCH = "/venv/lib/python3.11/site-packages/torch"


def shown(*frames: str) -> str:
    """A stack as faulthandler shows it, from "file:line function" frames, innermost first, beside an idle thread."""
    lines = []
    for frame in (*frames, "/src/drumline/forked.py:140 _outcome", "<string>:1 <module>"):
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
    "/src/drumline/step.py:97 backward",
    "/src/drumline/parallel.py:95 accumulate",
)
IN_LOSSES = shown(
    f"{TORCH}/distributed/distributed_c10d.py:3220 all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    "/src/drumline/cluster.py:181 sum",
    "/src/drumline/parallel.py:97 accumulate",
)
WAITS = [
    (IN_BACKWARD, "exchange", "the sum of the gradients (all_reduce in backward, step.py:97)"),
    (IN_BACKWARD, "compute", ""),  # its own part of backward
    (IN_LOSSES, "exchange", "the sum of the losses (all_reduce, parallel.py:97)"),
    (
        shown(
            f"{TORCH}/distributed/distributed_c10d.py:5 all_to_all_single", "/src/drumline/parallel.py:157 _exchange"
        ),
        "exchange",
        "the sum of the gradients (all_to_all_single, parallel.py:157)",
    ),
    (
        shown("/src/drumline/cluster.py:124 gather", "/src/drumline/guard.py:170 compare_replicas"),
        "exchange",
        "the comparison of the weights (word from the other ranks, guard.py:170)",
    ),
    (
        shown("/src/drumline/cluster.py:124 gather", "/home/me/mine.py:9 agree"),
        "starting",
        "word from the other ranks (mine.py:9)",
    ),
    (
        shown(
            f"{TORCH}/nn/parallel/distributed.py:2100 _distributed_broadcast_coalesced",
            f"{TORCH}/nn/parallel/distributed.py:1890 forward",
            "/src/drumline/pretrain.py:58 token_objective",
        ),
        "compute",
        "the handing out of rank 0's statistics (broadcast, pretrain.py:58)",
    ),
    (
        shown(f"{TORCH}/cuda/streams.py:231 synchronize", "/src/drumline/step.py:139 read"),
        "exchange",
        "the sums of gradients and losses on its device (synchronize, step.py:139)",
    ),
    (
        shown(f"{TORCH}/distributed/distributed_c10d.py:5 barrier", "/home/me/mine.py:9 meet"),
        "data",
        "barrier (mine.py:9)",
    ),
    (LOOP, "data", ""),
]


@pytest.mark.parametrize(("stack", "phase", "awaited"), WAITS)
def test_what_a_rank_waits_in_is_said_in_words(stack: str, phase: str, awaited: str) -> None:
    ends = [End(0, 10, None, 12, phase=phase), End(1, 11, None, 12, phase="data")]
    hang = Hang(1, "data", 12, 2.0, frozen=False)
    (other,) = hang_cause(hang, ends, stopped=False, stacks={0: stack, 1: LOOP}).others
    if awaited:
        assert other == f"rank 0 (process 10) waits in {awaited} at step 12"
    else:
        assert other.startswith("rank 0 (process 10) still ran at step 12, in ")


def test_of_ranks_that_came_equally_far_the_one_that_does_not_wait_is_named() -> None:
    ends = [End(rank, 10 + rank, None, 12, phase="exchange") for rank in range(3)]
    hang, busy = Hang(0, "exchange", 12, 9.0, frozen=False), shown("/home/me/optim.py:3 step")
    found = blame(hang, ends, {0: IN_BACKWARD, 1: busy, 2: IN_LOSSES})
    assert found is not None and found.rank == 1
    assert blame(hang, ends, dict.fromkeys(range(3), IN_LOSSES)) is None
    cause = hang_cause(hang, ends, stopped=False, stacks=dict.fromkeys(range(3), IN_LOSSES), all_wait=True)
    assert "was waiting, as all ranks here, for 9 s in exchange at step 12, in the sum of the losses" in cause.line


def test_the_report_has_the_rank_its_place_and_every_stack_without_idle_threads() -> None:
    ends = [End(0, 10, None, 12, phase="exchange"), End(1, 11, None, 12, phase="data")]
    hang = Hang(1, "data", 12, 61.0, frozen=False)
    cause = hang_cause(hang, ends, stopped=False, stacks={0: IN_BACKWARD, 1: LOOP})
    assert cause.line.startswith("rank 1 on ") and cause.line.endswith(
        "(process 11) was without progress for 61 s in data at step 12, in forever (data.py:7)"
    )
    assert cause.details[0].startswith("rank 0 (process 10) waits in the sum of the gradients")
    report = "\n".join(cause.details)
    assert "rank 0:\n" in report and "rank 1:\n" in report and " in forever" in report
    assert "_worker" not in report and "forked.py" not in report


def test_a_rank_that_exits_early_is_the_cause_and_not_those_that_lost_it() -> None:
    lost = {"exception": "Connection closed by peer", "traceback": "", "time": 5.0, "host": "here"}
    ends = [End(0, 10, 70, 12, lost, "exchange"), End(1, 11, 0, 12, None, "data")]
    cause = first_cause(ends)
    assert cause.line.endswith("(process 11) ended with exit code 0 at step 12 before the run's end")
    assert cause.others == ("rank 0 (process 10) lost its connection at step 12",)
    assert not End(1, 11, 0, 12, None, "ending").is_early
    assert not End(1, 11, 0, None, None, "starting").is_early  # a function that does not train may end when it likes
    assert End(1, 11, 0, None, None, "starting", to_end=True).is_early


def test_a_host_whose_ranks_lost_their_peer_adds_what_they_waited_in() -> None:
    hang = Hang(1, "data", 12, 2.0, frozen=False)
    told = hang_cause(hang, [End(1, 11, None, 12, phase="data")], stopped=False, stacks={1: LOOP}).as_dict()
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/src/drumline/step.py", line 97, in backward\n    scaled.backward()\n'
        f'  File "{TORCH}/autograd/graph.py", line 979, in _engine_run_backward\n    return run_backward(\n'
        "RuntimeError: Connection closed by peer"
    )
    lost = {"exception": "RuntimeError: Connection closed by peer", "traceback": trace, "time": 5.0, "host": "here"}
    cause = told_by_another({**told, "others": list(told["others"])}, [End(0, 10, 70, 12, lost, "exchange")])
    assert cause.rank == 1 and " in forever" in cause.trace and trace in cause.trace
    assert cause.others[-1].endswith(
        "rank 0 (process 10) lost its connection at step 12, "
        "waiting in the sum of the gradients (all_reduce in backward, step.py:97)"
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
def supervisor(tmp_path: Path) -> Iterator[Callable[..., tuple[Supervisor, FakeRanks]]]:
    made: list[Supervisor] = []

    def make(phases: dict[int, str], codes: dict[int, int | None], stacks: dict[int, str]) -> Any:
        spec = WorkerSpec("rank", len(codes), Meeting(), entrypoint=print, args=(), max_restarts=0)
        made.append(Supervisor(spec, Meeting(), max_restarts=0, limit_s=5.0))
        ranks: Any = FakeRanks(tmp_path, codes, stacks)
        made[-1]._folder, made[-1]._ranks = tmp_path, ranks
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ATTEMPT, str(tmp_path))
            for rank, phase in phases.items():
                patch.setenv("RANK", str(rank))
                pulse = Pulse.start()
                pulse._ended.set()
                pulse.at(phase, 12)
        return made[-1], ranks

    yield make
    for each in made:
        shutil.rmtree(each._scratch, ignore_errors=True)


def test_a_host_whose_ranks_all_wait_leaves_it_to_another_to_name_the_rank_for_a_while(
    supervisor: Callable[..., tuple[Supervisor, FakeRanks]],
) -> None:
    waiting, ranks = supervisor({0: "exchange", 1: "exchange"}, {0: None, 1: None}, {0: IN_BACKWARD, 1: IN_BACKWARD})
    group: Any = waiting._worker_group
    group.group_world_size = 2
    waiting._hang = Hang(0, "exchange", 12, 9.0, frozen=False)
    assert waiting._name_the_hang() is None and not ranks.killed
    while (cause := waiting._name_the_hang()) is None:
        assert not ranks.killed
    assert ranks.killed and "waiting, as all ranks here" in cause.line

    alone, ranks = supervisor({0: "exchange", 1: "exchange"}, {0: None, 1: None}, {0: IN_BACKWARD, 1: LOOP})
    alone._hang = Hang(0, "exchange", 12, 9.0, frozen=False)
    cause = alone._name_the_hang()
    assert isinstance(cause, Cause) and cause.rank == 1 and ranks.killed


def test_a_host_whose_only_rank_exits_early_has_not_succeeded(
    supervisor: Callable[..., tuple[Supervisor, FakeRanks]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, _ = supervisor({1: "data"}, {1: 0}, {})
    assert early._monitor_workers(early._worker_group).state == WorkerState.FAILED
    cause = early._settle()
    assert isinstance(cause, Cause) and cause.line.endswith("ended with exit code 0 at step 12 before the run's end")
    done, _ = supervisor({1: "ending"}, {1: 0}, {})
    assert done._monitor_workers(done._worker_group).state == WorkerState.SUCCEEDED
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    starting, _ = supervisor({1: "starting"}, {1: 0}, {})
    assert starting._monitor_workers(starting._worker_group).state == WorkerState.SUCCEEDED
    promise_an_ending()
    assert starting._monitor_workers(starting._worker_group).state == WorkerState.FAILED


def test_only_what_is_shown_after_it_was_asked_for_is_read(tmp_path: Path) -> None:
    (tmp_path / "stack-0").write_text(LOOP)
    stacks = Stacks(tmp_path, [0, 1])
    assert stacks.read() == {0: "", 1: ""}
    with (tmp_path / "stack-0").open("a") as file:
        file.write(IN_BACKWARD)
    stacks.wait(but=1)
    assert stacks.read() == {0: IN_BACKWARD, 1: ""}


FAULTS = ("data loop", "model loop", "update loop", "held lock", "stopped", "exit", "_exit")
WORK = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from drumline import Trainer
from drumline.launch import start_ranks

FAULTS = {faults!r}

def loop_for_ever():
    while True:
        pass

class Faults:
    steps = 0
    def at(self, *names):
        "Do what is next, if it is one of these, in the tenth step of an attempt and on rank 1."
        due = next((name for name in FAULTS if not Path(name).exists()), "")
        if os.environ["RANK"] == "1" and self.steps >= 10 and due in names:
            Path(due).touch()
            if due.endswith("loop"):
                loop_for_ever()
            if due == "held lock":
                ctypes.PyDLL(None).sleep(1000)  # a call into C that does not let Python's other threads run
            if due == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            sys.exit(0) if due == "exit" else os._exit(0)

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        faults.at("data loop", "held lock", "exit")
        return torch.ones(4) * index / 64, torch.ones(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
    def forward(self, inputs):
        faults.at("model loop", "stopped", "_exit")
        return self.layer(inputs)

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        faults.at("update loop")
        faults.steps += 1
        return super().step(closure)

def work():
    global faults
    faults, model = Faults(), Model()
    optimizer = Optimizer(model.parameters(), lr=1e-4)
    trainer = Trainer(model, Data(), optimizer, loss=nn.MSELoss(), batch_size=2, run_dir="run", device="cpu")
    trainer.fit(total_steps=200, log_every=100, save_every=5)

if __name__ == "__main__":
    sys.exit(start_ranks(work, (), nproc=2, max_restarts=None, hang_timeout=3))
"""


def test_each_way_to_stand_still_or_leave_is_named_and_the_run_goes_on_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK.format(faults=FAULTS))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    done = subprocess.run(
        [sys.executable, "work.py"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = done.stderr
    waits = (
        r"\nrank 0 \(process \d+\) waits in the sum of the gradients \(all_reduce in backward, step.py:\d+\) at step "
    )
    rank_1 = r"rank 1 on \S+ \(process \d+\) "
    for report in (
        r"was without progress for \d+ s in data at step \d+, in loop_for_ever \(work.py:\d+\); starting .*" + waits,
        r"was without progress for \d+ s in compute at step \d+, in loop_for_ever \(work.py:\d+\); starting .*" + waits,
        r"was without progress for \d+ s in exchange at step \d+, in loop_for_ever \(work.py:\d+\); starting .*"
        + waits,
        r"was frozen for \d+ s in data at step \d+, in at \(work.py:\d+\); starting .*" + waits,
        r"was stopped \(SIGSTOP\) for \d+ s in compute at step \d+, in at \(work.py:\d+\); starting .*" + waits,
    ):
        assert re.search(rank_1 + report, told), f"{report}\n{told}"
    assert len(re.findall(rank_1 + r"ended with exit code 0 at step \d+ before the run's end; starting", told)) == 2, (
        told
    )
    assert re.search(r" in loop_for_ever\n  File .*work.py.* in at\n  File .*work.py.* in __getitem__\n", told), told
    assert not re.search(r"^rank 0 on ", told, re.MULTILINE), told


STUCK = """
import os
from pathlib import Path
from drumline.model import GPT

class Stuck(GPT):
    calls = 0
    def forward(self, *inputs, **more):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 60 and not Path("happened").exists():
            Path("happened").touch()
            while True:
                pass
        return super().forward(*inputs, **more)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path) as pair:
        yield pair


def test_a_rank_that_hangs_on_another_host_is_named_on_both_and_the_run_goes_on(
    hosts: tuple[Host, Host], tmp_path: Path, text: Path
) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    more = (
        "--batch_size 2 --global_batch_size 4 --total_steps 80 --save_every 20 --eval_every 100000 --model stuck:Stuck "
        "--nproc 1 --nnodes 2 --rdzv_endpoint host-a:29400 --hang_timeout 3"
    )
    flags = small("--train_data_path", str(text), "--run_dir", str(tmp_path / "run"), *more.split())
    command = [sys.executable, "-m", "drumline", "train", *flags]
    both = [host.start(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}) for host in hosts]
    assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)
    for each in both:
        named = re.search(
            r"rank 1 on host-b \(process \d+\) was without progress for \d+ s in compute at step \d+", each.said
        )
        assert named and not re.search(r"rank 0 on host-a \(process \d+\) (was|lost)", each.said), each.said
        assert 'stuck.py", line' in each.said, each.said
    waited = (
        r"on host-a: rank 0 \(process \d+\) lost its connection at step \d+, waiting in the sum of the gradients \("
    )
    assert re.search(waited, both[0].said), both[0].said
