"""A run that is stopped in the middle of an epoch goes on, on any other number of ranks, to the same bits."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.checkpoint.retention import step_of
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics
from drumline.trainer.trainer import Trainer

SIZES, STEPS, STOP = (1, 2, 3, 4), 6, 3


def _fit(run_dir: str, stop: bool) -> tuple[str, int, str]:
    """As a rank: how it ended. The last rank is asked to stop while step STOP is computed."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    inputs = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        model,
        TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=F.mse_loss,
        batch_size=2,
        global_batch_size=14,  # seven micro-batches: no number of ranks from 2 to 4 divides them evenly
        run_dir=run_dir,
        device="cpu",
        bitwise=True,
    )
    setup = trainer.setup
    clean = setup.batches.micro_batch

    def then_stop(step: int, index: int) -> Any:
        last_share = setup.batches.plan.share(setup.world.size - 1, setup.world.size)
        if step == STOP - 2 and index == last_share.start:
            signal.raise_signal(signal.SIGTERM)  # the ranks agree on it with the next step
        return clean(step, index)

    if stop:
        setup.batches.micro_batch = then_stop  # type: ignore[method-assign]
    result = trainer.fit(total_steps=STEPS, log_every=1)
    return result.state, result.step, result.weights_sha256


@pytest.mark.parametrize("before", SIZES)
def test_a_run_stopped_on_some_ranks_ends_with_the_same_bits_on_any_other_number(here: Path, before: int) -> None:
    whole = run_ranks(_fit, [("whole", False)])[0].value
    stopped = run_ranks(_fit, [("stopped", True)] * before)
    assert {outcome.value[:2] for outcome in stopped} == {("stopped", STOP)}, [o.err for o in stopped]
    assert len({outcome.value for outcome in stopped}) == 1
    (newest,) = checkpoint_paths(RunFolder(Path("stopped")).checkpoints)
    assert open_checkpoint(newest).step == step_of(newest) == STOP
    for after in SIZES:
        run = shutil.copytree("stopped", f"on {after}")
        resumed = run_ranks(_fit, [(run, False)] * after)
        assert {outcome.value for outcome in resumed} == {whole}, [o.err for o in resumed]
        assert [record["step"] for record in read_metrics(Path(run) / "metrics.jsonl")] == list(range(1, STEPS + 1))
