"""The number of ranks does not change the run: the same sequences, the same curve, with --bitwise the same bits."""

import hashlib
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks, train_ranks
from helpers.small import small
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drumline.data.batches import BatchPlan, TokenBatches
from drumline.data.opening import open_tokens
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics
from drumline.trainer.trainer import Trainer

STEPS = 20
# Seven micro-batches: no number of ranks from 2 to 4 divides them evenly.
DATA = "--train_data_path text --batch_size 2 --global_batch_size 14 --dropout 0.2 --eval_every 10".split()
FLAGS = small(*DATA, "--total_steps", str(STEPS))
# Muon makes small directions of a gradient as large as the others, and so the rounding in them.
PLAIN = ("--recipe", "classic")


def train(size: int, run: str, *flags: str) -> None:
    for outcome in train_ranks(size, *FLAGS, "--run_dir", run, *flags):
        assert outcome.code == 0, outcome.err


def losses(run: str, key: str = "loss") -> list[float]:
    return [record[key] for record in read_metrics(Path(run) / "metrics.jsonl") if key in record]


def sha256(run: str) -> str:
    status = RunFolder(Path(run)).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def test_curves_at_1_2_3_and_4_ranks_agree(here: Path) -> None:
    for size in (1, 2, 3, 4):
        train(size, f"w{size}", *PLAIN)
        assert len(losses(f"w{size}")) == STEPS
        assert losses(f"w{size}") == pytest.approx(losses("w1"), rel=1e-5)
        assert losses(f"w{size}", "valid_loss") == pytest.approx(losses("w1", "valid_loss"), rel=1e-5)


def test_every_step_sees_the_same_sequences_on_any_number_of_ranks(here: Path) -> None:
    train(1, "w1")
    (prepared,) = Path("data").iterdir()
    plan = BatchPlan(2, 7)
    batches = TokenBatches(open_tokens(prepared), plan, context=16, seed=0)

    def digest(world_size: int, step: int) -> str:
        seen = hashlib.sha256()
        for rank in range(world_size):
            for index in plan.share(rank, world_size):
                for tensor in batches.micro_batch(step, index)[:2]:
                    seen.update(tensor.numpy().tobytes())
        return seen.hexdigest()

    for step in range(STEPS):
        assert len({digest(world_size, step) for world_size in (1, 2, 3, 4)}) == 1


def test_bitwise_gives_the_same_bits_at_1_2_3_and_4_ranks_whatever_the_threads(here: Path) -> None:
    # With Muon, as the preset has it.
    for size in (1, 2, 3, 4):
        train(size, f"w{size}", "--bitwise")
    from helpers.ranks import _command  # a single process with more threads than the ranks have

    (outcome,) = run_ranks(
        _command, [(["train", *FLAGS, "--run_dir", "threads", "--bitwise"],)], environ={"OMP_NUM_THREADS": "3"}
    )
    assert outcome.code == 0, outcome.err
    assert len({sha256(run) for run in ("w1", "w2", "w3", "w4", "threads")}) == 1
    assert losses("w1") == losses("w4")


def test_a_bitwise_run_stopped_and_resumed_on_other_ranks_again_and_again_ends_with_the_same_bits(here: Path) -> None:
    # The learning rate must not depend on the length, so that a shorter run is a run stopped in the middle of an epoch.
    same = ("--bitwise", "--schedule", "constant", "--warmup_steps", "3")
    train(1, "whole", *same)
    for size, stop in ((4, 4), (2, 11), (3, STEPS)):
        flags = [*same, "--run_dir", "part", "--total_steps", str(stop), "--allow_change", "total_steps"]
        for outcome in train_ranks(size, *small(*DATA, *flags)):
            assert outcome.code == 0, outcome.err
        assert RunFolder(Path("part")).read_status()["step"] == stop
    assert sha256("part") == sha256("whole")
    assert losses("part") == losses("whole")


def test_the_default_mode_resumes_on_other_ranks_with_the_same_curve_and_batch(here: Path) -> None:
    train(1, "whole", *PLAIN)
    train(4, "part", "--save_every", "8", "--keep_checkpoints", "9", *PLAIN)
    folder = RunFolder(Path("part"))
    for step in (16, 20):
        folder.checkpoint(step).rename(folder.checkpoints / f"gone-{step}")
    # Only the folder is named: the size of a step is the run's, not batch_size x the ranks of now.
    for outcome in train_ranks(3, "--run_dir", "part"):
        assert outcome.code == 0, outcome.err
    assert losses("part") == pytest.approx(losses("whole"), rel=1e-5)


def test_only_rank_0_speaks_and_says_how_the_step_comes_about(here: Path) -> None:
    scaled = ("--lr", "0.002", "--scale_lr", "sqrt", "--base_batch_size", "56")
    outcomes = train_ranks(3, *FLAGS, "--run_dir", "run", *scaled)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0]
    assert [outcome.out for outcome in outcomes[1:]] == ["", ""] and all(outcome.err == "" for outcome in outcomes)
    assert "batch_size 2 x 7 micro-batches (3 + 2 + 2 on 3 ranks) = 14 sequences = 224 tokens" in outcomes[0].out
    assert "lr     0.002 x square root of (14 / 56 sequences) = 0.001 at its peak" in outcomes[0].out
    even = train_ranks(
        2, *small("--train_data_path", "text", "--gradient_accumulation_steps", "3", "--run_dir", "even")
    )
    assert "batch_size 4 x 2 ranks x 3 accumulated = 24 sequences" in even[0].out


def test_more_ranks_than_micro_batches_is_an_error_that_names_both(here: Path) -> None:
    outcomes = train_ranks(3, *small("--train_data_path", "text", "--global_batch_size", "8", "--run_dir", "run"))
    assert [outcome.code for outcome in outcomes] == [1, 1, 1]
    assert "3 ranks cannot share a step of 2 micro-batches" in outcomes[0].err
    assert outcomes[1].err == outcomes[2].err == ""


def _fit(run_dir: str, steps: int, normed: bool, seed: int = 5) -> str:
    torch.manual_seed(seed)
    middle: nn.Module = nn.BatchNorm1d(8) if normed else nn.Tanh()
    model = nn.Sequential(nn.Linear(6, 8), middle, nn.Dropout(0.3), nn.Linear(8, 1))
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model,
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=F.mse_loss,
        batch_size=4,
        global_batch_size=20,
        run_dir=run_dir,
        device="cpu",
        bitwise=not normed,
    )
    return trainer.fit(total_steps=steps, log_every=1).weights_sha256


def test_any_model_trains_to_the_same_bits_on_any_number_of_ranks(here: Path) -> None:
    for size in (1, 2, 3):
        outcomes = run_ranks(_fit, [(f"any{size}", 8, False)] * size)
        assert {outcome.value for outcome in outcomes} == {sha256("any1")}, outcomes[0].err
    for size, steps in ((2, 3), (3, 8)):
        outcomes = run_ranks(_fit, [("again", steps, False)] * size)
    assert outcomes[0].value == sha256("any1")


def test_ranks_whose_first_weights_were_drawn_apart_train_rank_0s(here: Path) -> None:
    outcomes = run_ranks(_fit, [("apart", 3, False, seed) for seed in (5, 6)])
    (alone,) = run_ranks(_fit, [("alone", 3, False, 5)])
    assert {outcome.value for outcome in outcomes} == {alone.value}, outcomes[1].err


def test_a_model_with_running_statistics_keeps_them_alike_on_all_ranks(here: Path) -> None:
    outcomes = run_ranks(_fit, [("norm", 5, True)] * 2)
    assert outcomes[0].code == 0 and len(losses("norm")) == 5, outcomes[0].err
