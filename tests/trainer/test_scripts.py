"""A user's mistake in a script is answered in two lines, by one rank."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.warm import Warm
from torch import nn

from drumline import Trainer
from drumline.errors import UsageError

SCRIPT = """
import sys, torch
from torch import nn
from drumline import Trainer, TrainConfig, pretrain
from drumline.config.settings import DataConfig, RunConfig
what = sys.argv[1]
if what == "pretrain":
    pretrain(TrainConfig(data=DataConfig(train_data_path="nowhere"), run=RunConfig(device="cpu")))
torch.seed() if what == "data" else torch.manual_seed(0)
model, data = nn.Linear(2, 1), [(torch.randn(2), torch.randn(1)) for _ in range(8)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if what == "argument":
    Trainer(model, data, optimizer, batchsize=2)
trainer = Trainer(model, data, optimizer, device="cpu", run_dir="run")
trainer.fit(epochs=0 if what == "length" else 1)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def end(where: Path, *words: str) -> tuple[int, list[str]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(where)}
    (where / "work.py").write_text(SCRIPT)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with Warm([sys.executable, *words], cwd=where, env=env, text=True, **streams) as process:
        said = process.communicate(timeout=120)[0]
    return process.returncode, said.splitlines()


@pytest.mark.parametrize(
    ("mistake", "code", "problem"),
    [
        ("pretrain", 1, "error: nowhere"),
        ("argument", 2, "error: Trainer has no argument batchsize"),
        ("length", 1, "error: a run of 0 steps does nothing"),
    ],
)
def test_a_mistake_is_two_lines_and_the_exit_code_of_the_command(
    tmp_path: Path, mistake: str, code: int, problem: str
) -> None:
    ended, lines = end(tmp_path, "work.py", mistake)
    assert ended == code and len(lines) == 2 and lines[0].startswith(problem) and lines[1].startswith("  fix: ")
    assert {path.name for path in tmp_path.iterdir()} == {"work.py"}


@pytest.mark.parametrize("mistake", ["length", "data"])
def test_under_torchrun_one_rank_prints_the_two_lines_and_the_others_need_no_paragraph(
    tmp_path: Path, mistake: str
) -> None:
    ended, lines = end(tmp_path, *TORCHRUN, "work.py", mistake)
    problem = {"length": "error: a run of 0 steps", "data": "error: each rank has other data"}[mistake]
    assert ended == 1 and len([line for line in lines if line.startswith(problem)]) == 1
    assert not [line for line in lines if line.startswith("[rank")]
    assert "traceback : " + problem in "\n".join(lines[-4:])  # what torchrun says last
    if mistake == "data":  # the ranks are connected, so that one of them can speak for both
        assert len(lines) < 60


def test_a_misspelled_argument_is_answered_with_the_one_that_was_meant() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="Trainer has no argument grad_acumulation_steps") as raised:
        Trainer(model, [(0, 0)], optimizer, grad_acumulation_steps=2)  # type: ignore[call-arg]
    assert raised.value.fix == "did you mean gradient_accumulation_steps?"
    trainer = Trainer(model, [(torch.zeros(2), torch.zeros(1))], optimizer, batch_size=1, device="cpu")
    with pytest.raises(UsageError, match=r"Trainer\.fit has no argument epoch") as raised:
        trainer.fit(epoch=2)  # type: ignore[call-arg]
    assert raised.value.fix == "did you mean epochs?"
