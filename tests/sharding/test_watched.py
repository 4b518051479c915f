"""What watches a run watches a sharded one too: stragglers, NaN, replicas that differ, steps computed again."""

import math
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers.poisoned import events, fit, make, sample_of
from helpers.ranks import run_ranks, train_ranks
from helpers.small import small
from helpers.warm import Warm
from torch import nn

from drumline.cli.app import run_command
from drumline.parallel.stragglers import WINDOW
from drumline.pieces.rows import local_part
from drumline.trainer.trainer import Trainer

HOST = socket.gethostname()


class Slow(nn.Module):
    """Sleeps in forward on the last rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03 if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1 else 0.0)
        out: torch.Tensor = self.layer(inputs)
        return out


def _slow(run: str) -> None:
    model = Slow()
    data = [(torch.full((4,), number / 64), torch.ones(1)) for number in range(64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, data, optimizer, loss=nn.MSELoss(), batch_size=1, run_dir=run, shard="full")
    trainer.fit(total_steps=WINDOW + 5, log_every=100)


@pytest.mark.parametrize("size", [2, 3])
def test_a_slow_rank_of_a_sharded_run_is_named(here: Path, size: int) -> None:
    ended = run_ranks(_slow, [("run",)] * size)
    assert [each.code for each in ended] == [0] * size, ended
    (named,) = events("run", "straggler")
    assert named["rank"] == size - 1 and named["times_median"] > 1.15


def _poisoned(run: str, bad: int) -> str:
    return fit(run, poison={bad: math.inf}, shard="none" if run == "alone" else "full").weights_sha256


def test_bad_data_on_one_rank_of_a_sharded_run_is_skipped_by_all_and_named(here: Path) -> None:
    bad = sample_of(3, micro_batch=5)
    outcomes = run_ranks(_poisoned, [("run", bad)] * 3)
    (alone,) = run_ranks(_poisoned, [("alone", bad)])
    assert {outcome.value for outcome in outcomes} == {alone.value}, [outcome.err for outcome in outcomes]
    (event,) = events("run", "not finite")
    assert event["where"] == f"on rank 2 ({HOST})" and f"sample {bad}," in event["documents"] + ","
    assert [event["step"] for event in events("run", "skipped")] == [3]


def _flipped(run: str) -> None:
    trainer = make(run, shard=2)

    def flip() -> dict[str, float]:
        if trainer.setup.world.rank == 1:
            own = local_part(next(trainer.setup.step.model.parameters()))
            own.view(torch.int32)[0, 0] ^= 1
        return {}

    trainer.fit(total_steps=4, save_every=4, eval_every=2, evaluate=flip)


def test_a_bit_that_is_flipped_in_one_replica_is_noticed(here: Path) -> None:
    outcomes = run_ranks(_flipped, [("run",)] * 4)
    assert all("ReplicaDriftError" in each.err and "differ" in each.err for each in outcomes), outcomes


FLAGS = small(
    *"--n_layers 2 --train_data_path text --global_batch_size 8 --batch_size 2 --bitwise --run_dir run".split(),
    *"--save_every 2 --keep_checkpoints 9 --recipe classic --valid_fraction 0.1".split(),
)


@pytest.mark.parametrize(("size", "shard"), [(2, "full"), (4, "2")])
def test_steps_of_a_sharded_run_can_be_computed_again_and_blamed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, size: int, shard: str
) -> None:
    assert [each.code for each in train_ranks(size, *FLAGS, "--shard", shard)] == [0] * size
    monkeypatch.setattr(subprocess, "Popen", Warm)
    for ranks in ("1", "2", "3"):
        assert run_command(["replay", "run", "--step", "6", "--ranks", ranks]) == 0
        assert "same bits" in capsys.readouterr().out
    assert run_command(["blame", "run", "--step", "4", "--losses"]) == 0
    assert "computed again" in capsys.readouterr().out
