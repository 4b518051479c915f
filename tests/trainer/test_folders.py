"""Without a run_dir, a script goes on with its own run, and never with another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drumline.cli.app import run_command
from drumline.errors import CheckpointError, ConfigError
from drumline.files.run_folder import RunFolder
from drumline.trainer.sameness import script_name
from drumline.trainer.trainer import Trainer


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Train as the script work.py does; gives the run folder's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["some/work.py"])

    def run(steps: int, *, lr: float = 0.01, data_seed: int = 0, width: int = 3, **settings: Any) -> str:
        torch.manual_seed(data_seed)
        data = TensorDataset(torch.randn(20, width), torch.randn(20, 1))
        model = nn.Linear(width, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        trainer = Trainer(model, data, optimizer, loss=F.mse_loss, batch_size=4, device="cpu", **settings)
        trainer.fit(total_steps=steps)
        return trainer.folder.path.name

    return run


def test_a_finished_run_goes_on_if_it_is_to_be_longer_else_the_next_one_is_new(fit: Callable[..., str]) -> None:
    assert [fit(2), fit(4), fit(4), fit(3), fit(5)] == ["work", "work", "work-2", "work-3", "work"]


def test_a_run_with_other_settings_model_data_or_optimizer_is_another_one(fit: Callable[..., str]) -> None:
    fit(2)
    others = [{"seed": 1}, {"global_batch_size": 8}, {"lr": 0.02}, {"data_seed": 1}, {"width": 4}, {"facts": {"x": 1}}]
    assert [fit(4, **other) for other in others] == [f"work-{number}" for number in range(2, 8)]
    assert fit(4, resume=False) == "work-8" and fit(4) == "work"


def test_a_run_that_ended_early_goes_on(fit: Callable[..., str]) -> None:
    fit(6)
    status = RunFolder(Path("runs/work")).read_status()
    for state in ("stopped", "failed", "running"):  # running, by a process that is gone
        RunFolder(Path("runs/work")).write_status(state, step=6, total_steps=6)
        (Path("runs/work") / "status.json").write_text(
            (Path("runs/work") / "status.json").read_text().replace(f'"pid": {status["pid"]}', '"pid": 999999999')
        )
        assert fit(6) == "work"


def test_a_named_folder_is_refused_if_it_has_another_run_and_nothing_is_written(fit: Callable[..., str]) -> None:
    fit(2, run_dir="mine")
    before = {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="seed 0 -> 1"):
        fit(4, run_dir="mine", seed=1)
    with pytest.raises(ConfigError, match="has a run already"):
        fit(4, run_dir="mine", resume=False)
    assert {path: path.read_bytes() for path in Path("mine").rglob("*") if path.is_file()} == before
    assert fit(4, run_dir="mine") == "mine"


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("a/3.torchrun.py", "3.torchrun"),
        ("-c", "trainer"),
        ("", "trainer"),
        ("my run.py", "my-run"),
    ],
)
def test_a_run_is_named_after_its_script(script: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [script])
    assert script_name() == name


def test_drumline_runs_lists_a_trainers_runs(fit: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    fit(2)
    capsys.readouterr()
    assert run_command(["runs"]) == 0
    assert "runs/work" in capsys.readouterr().out


def test_commands_for_gpts_say_that_a_run_is_a_trainers(
    fit: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    fit(2)
    for command in (["evaluate", "runs/work"], ["sample", "runs/work"], ["train", "--run_dir", "runs/work"]):
        capsys.readouterr()
        assert run_command(command) == 1
        said = capsys.readouterr().err.splitlines()
        assert said[0].startswith("error: runs/work was trained by a script with Trainer") and len(said) == 2
