"""Ranks that stand still or leave, for real: each is named, and the run goes on."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hosts import Host, two_hosts
from helpers.small import small
from helpers.warm import run_warm

pytestmark = pytest.mark.needs_shm
TIMEOUT_S = 240
FAULTS = ("data loop", "model loop", "update loop", "held lock", "stopped", "exit", "_exit")
WORK = """
import ctypes, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from drumline import Trainer
from drumline.elastic.launch import start_ranks

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
                time.sleep(1000)  # let go on to show its stack, it is still here
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
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    def forward(self, inputs):
        faults.at("model loop", "stopped", "_exit")
        return self.layers[1](self.layers[0](inputs))[:, :1]

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        faults.at("update loop")
        faults.steps += 1
        return super().step(closure)

def work():
    global faults
    faults, model = Faults(), Model()
    optimizer = Optimizer(model.parameters(), lr=1e-4)
    more = dict(batch_size=2, run_dir="run", device="cpu", shard={shard!r})
    trainer = Trainer(model, Data(), optimizer, loss=nn.MSELoss(), **more)
    trainer.fit(total_steps=200, log_every=100, save_every=5)

if __name__ == "__main__":
    sys.exit(start_ranks(work, (), nproc=2, max_restarts=None, hang_timeout=3))
"""


def ended(where: Path, *faults: str, shard: str = "none") -> str:
    """What a run with these faults says of them."""
    (where / "work.py").write_text(WORK.format(faults=faults, shard=shard))
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    done = run_warm([sys.executable, "work.py"], cwd=where, env=clean, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_sharded_run_names_the_rank_that_stands_still_and_what_the_others_wait_for(tmp_path: Path) -> None:
    err = ended(tmp_path, "model loop", shard="full")
    stuck = r"rank 1 on \S+ \(process \d+\) was without progress for \d+ s in compute at step \d+, in loop_for_ever .*"
    waits = r"\nrank 0 \(process \d+\) waits in the weights of the other ranks at step "
    assert re.search(stuck + "restart.*" + waits, err), err


@pytest.mark.long
def test_each_way_to_stand_still_or_leave_is_named_and_the_run_goes_on_to_its_end(tmp_path: Path) -> None:
    err = ended(tmp_path, *FAULTS)
    waits = r"\nrank 0 \(process \d+\) waits in the sum of the gradients at step "
    rank_1 = r"rank 1 on \S+ \(process \d+\) "
    for report in (
        r"was without progress for \d+ s in data at step \d+, in loop_for_ever \(work.py:\d+\); restart.*" + waits,
        r"was without progress for \d+ s in compute at step \d+, in loop_for_ever \(work.py:\d+\); restart.*" + waits,
        r"was without progress for \d+ s in exchange at step \d+, in loop_for_ever \(work.py:\d+\); restart.*" + waits,
        r"was frozen for \d+ s in data at step \d+, in at \(work.py:\d+\); restart.*" + waits,
        r"was stopped \(SIGSTOP\) for \d+ s in compute at step \d+, in at \(work.py:\d+\); restart.*" + waits,
    ):
        assert re.search(rank_1 + report, err), f"{report}\n{err}"
    assert len(re.findall(rank_1 + r"exited with code 0 at step \d+ before the end of the run; rest", err)) == 2, err
    assert re.search(r" in loop_for_ever\n  File .*work.py.* in at\n  File .*work.py.* in __getitem__\n", err), err
    assert not re.search(r"^rank 0 on ", err, re.MULTILINE), err


STUCK = """
import os
from pathlib import Path
from drumline.model.gpt import GPT

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


@pytest.mark.needs("hosts")
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
    both = [host.start(command, cwd=tmp_path) for host in hosts]
    assert [each.ended(within_s=TIMEOUT_S) for each in both] == [0, 0], "\n".join(each.said for each in both)
    for each in both:
        named = re.search(
            r"rank 1 on host-b \(process \d+\) was without progress for \d+ s in compute at step \d+", each.said
        )
        assert named and not re.search(r"rank 0 on host-a \(process \d+\) (was|lost)", each.said), each.said
        assert 'stuck.py", line' in each.said, each.said
    # Unless its launcher has heard of the cause, and ended it, before it could see that itself.
    waited = r"on host-a: rank 0 \(process \d+\) lost its connection at step \d+, waiting in the sum of the gradients"
    assert re.search(waited, both[0].said) or "lost its connection" not in both[0].said, both[0].said
