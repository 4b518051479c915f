"""Ranks whose weights are no longer the same: noticed, named, and kept out of the checkpoints."""

import itertools
import math
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.poisoned import events, make
from helpers.ranks import Outcome, _command, run_ranks
from helpers.small import small
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from drumline.checkpoint.checkpoints import checkpoint_paths
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.state import weights_fingerprint
from drumline.config.model import GPTConfig
from drumline.errors import EXIT_CRASHED
from drumline.files.run_folder import RunFolder
from drumline.model.gpt import GPT
from drumline.train.guard import ReplicaDriftError

HOST = socket.gethostname()


class Flipped(GPT):
    """A GPT of whose weights one bit flips on one rank, after some step's forward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.steps = itertools.count(1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        if self.training and next(self.steps) == 3 and os.environ["RANK"] == os.environ["FLIPS"]:
            flip(next(self.parameters()).data, bit=20)  # unseen by autograd, as a cosmic ray would be
        return result


def flip(tensor: Tensor, *, bit: int) -> None:
    """bit: counted over all of the tensor's bytes"""
    byte = tensor.view(-1).view(torch.uint8)[bit // 8 : bit // 8 + 1]
    byte.copy_(byte ^ (1 << bit % 8))


def train_flipped(size: int, rank: int, *flags: str) -> list[Outcome]:
    argv = small("--train_data_path", "text", "--model", f"{__name__}:Flipped", "--run_dir", "run", *flags)
    argv += ["--global_batch_size", str(4 * size)]
    return run_ranks(_command, [(["train", *argv],)] * size, environ={"FLIPS": str(rank)})


@pytest.mark.parametrize(
    ("size", "rank", "every", "noticed", "names"),
    [
        (3, 1, "1", 3, f"rank 1 on {HOST} has different weights than the 2 other ranks"),
        (3, 0, "9", 4, f"rank 0 on {HOST} has different weights than the 2 other ranks"),
        (2, 1, "9", 4, f"the weights of the replicas (rank 0 on {HOST}, rank 1 on {HOST}) differ"),
    ],
)
def test_one_flipped_bit_on_one_rank_is_noticed_and_named_before_it_gets_into_a_checkpoint(
    here: Path, text: Path, size: int, rank: int, every: str, noticed: int, names: str
) -> None:
    outcomes = train_flipped(size, rank, "--check_replicas_every", every, "--save_every", "2")
    assert [outcome.code for outcome in outcomes] == [EXIT_CRASHED] * size
    lines = outcomes[0].err.splitlines()
    assert lines[0] == f"error: {names} at step {noticed}" and lines[1].startswith("  fix: ") and len(lines) == 2
    assert all(outcome.err == "" for outcome in outcomes[1:])
    (event,) = events("run", "replica drift")
    assert names in event["what"]
    assert [step_of(path) for path in checkpoint_paths(RunFolder(Path("run")).checkpoints)] == [2]


def _stop_with_drift(run_dir: str) -> None:
    trainer = make(run_dir)
    rank = trainer.setup.world.rank

    def drift_and_stop() -> dict[str, Any]:
        if rank == 1:
            flip(next(trainer.setup.step.model.parameters()).detach(), bit=1)
            signal.raise_signal(signal.SIGTERM)
        return {}

    trainer.fit(total_steps=5, save_every=5, eval_every=2, evaluate=drift_and_stop)


def test_a_drifted_run_that_is_told_to_stop_saves_nothing(here: Path) -> None:
    outcomes = run_ranks(_stop_with_drift, [("run",)] * 2)
    assert all(ReplicaDriftError.__name__ in outcome.err for outcome in outcomes), outcomes
    assert checkpoint_paths(RunFolder(Path("run")).checkpoints) == []


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(), (1,), (3,), (2, 3), (5, 1), (0,), (7, 0)]),
    offset=st.integers(0, 3),
    draw=st.integers(0, 2**31),
)
def test_any_single_flipped_bit_changes_the_fingerprint(
    dtype: torch.dtype, shape: tuple[int, ...], offset: int, draw: int
) -> None:
    model = nn.Linear(2, 1)
    generator = torch.Generator().manual_seed(draw)
    whole = torch.randint(0, 2, (offset + math.prod(shape),), generator=generator).to(dtype)
    model.register_buffer("odd", whole[offset:].view(shape))  # a part of something larger need not be aligned
    model.register_buffer("empty", torch.empty(0))
    before = weights_fingerprint(model)
    tensors = [tensor.detach() for tensor in model.state_dict(keep_vars=True).values() if tensor.numel()]
    tensor = tensors[draw % len(tensors)]
    bit = draw % (8 * tensor.nbytes) if tensor.dtype != torch.bool else 8 * (draw % tensor.numel())
    flip(tensor, bit=bit)
    assert weights_fingerprint(model) != before
    flip(tensor, bit=bit)
    assert weights_fingerprint(model) == before
