"""A script's run goes on with any number of ranks: a step keeps its samples, whoever computes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import Outcome, run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drumline.errors import CheckpointError
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics
from drumline.trainer.trainer import Trainer


def fit(steps: int, settings: dict[str, Any]) -> list[Any]:
    """Train as the script work.py; gives the run folder and the weights."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = Trainer(model, data, optimizer, loss=F.mse_loss, device="cpu", **{"batch_size": 4, **settings})
    trainer.fit(total_steps=steps, log_every=1)
    return [str(trainer.folder.path), model.weight.tolist()]


def on_ranks(ranks: int, steps: int, **settings: Any) -> list[Outcome]:
    return run_ranks(fit, [(steps, settings)] * ranks)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["work.py"])


def test_a_run_of_one_rank_goes_on_with_two_and_with_one_again(capsys: pytest.CaptureFixture[str]) -> None:
    fit(3, {"run_dir": "run"})
    first, second = on_ranks(2, 6, run_dir="run")
    assert (first.code, second.code) == (0, 0), first.err
    assert "batch_size 2 x 2 ranks x 1 accumulated = 4 samples" in first.out
    capsys.readouterr()
    _, weights = fit(9, {"run_dir": "run"})
    assert "batch_size 4 x 1 rank x 1 accumulated = 4 samples" in capsys.readouterr().out
    _, undisturbed = fit(9, {"run_dir": "undisturbed"})
    torch.testing.assert_close(torch.tensor(weights), torch.tensor(undisturbed))
    losses = [
        [record["loss"] for record in read_metrics(Path(run) / "metrics.jsonl")] for run in ("run", "undisturbed")
    ]
    assert losses[0] == pytest.approx(losses[1])
    (finished, _) = on_ranks(2, 9, run_dir="run")
    assert "this run had finished already, at step 9" in finished.out


def test_a_run_of_two_ranks_goes_on_with_one_which_accumulates(capsys: pytest.CaptureFixture[str]) -> None:
    assert [rank.code for rank in on_ranks(2, 2, run_dir="run")] == [0, 0]
    fit(4, {"run_dir": "run"})
    assert "batch_size 4 x 1 rank x 2 accumulated = 8 samples" in capsys.readouterr().out


def test_ranks_that_cannot_share_a_step_are_told_how_many_can() -> None:
    fit(2, {"run_dir": "run"})
    first, *_ = on_ranks(3, 4, run_dir="run")
    assert first.err.splitlines() == [
        "ConfigError: 3 ranks cannot share the 4 samples per step that this run began with",
        "start 2 or 4 ranks, or choose another run_dir for a new run",
    ]


def test_without_a_run_dir_a_stopped_run_is_found_by_other_ranks_and_a_finished_one_is_left_alone() -> None:
    fit(4, {})
    RunFolder(Path("runs/work")).write_status("stopped", step=4, total_steps=6)
    assert on_ranks(2, 6)[0].value[0] == "runs/work"
    assert on_ranks(2, 6)[0].value[0] == "runs/work-2"


def test_a_script_that_asks_for_another_batch_is_refused_as_before() -> None:
    fit(2, {"run_dir": "run"})
    for other in ({"batch_size": 8}, {"gradient_accumulation_steps": 2}, {"global_batch_size": 8}):
        with pytest.raises(CheckpointError, match="global_batch_size 4 -> 8"):
            fit(4, {"run_dir": "run", **other})
