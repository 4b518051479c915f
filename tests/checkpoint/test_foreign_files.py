"""What another script saved with torch.save can be resumed from, or is refused with what it lacks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from drumline.checkpoint.state import weights
from drumline.cli.app import run_command
from drumline.errors import CheckpointError
from drumline.trainer.trainer import Trainer

Made = tuple[nn.Module, torch.optim.Optimizer]


def made(seed: int = 0) -> Made:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


@pytest.fixture
def resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Made, int, str]]:
    """Resume a Trainer of 20 samples, 4 per step, from a file; gives what it has then, its step and what it said."""

    def run(content: Any, *, steps: int = 100, name: str = "other.pt") -> tuple[Made, int, str]:
        torch.save(content, tmp_path / name)
        model, optimizer = made(seed=1)
        data = TensorDataset(torch.zeros(20, 3), torch.zeros(20, 1))
        trainer = Trainer(
            model,
            data,
            optimizer,
            loss=F.mse_loss,
            batch_size=4,
            run_dir=tmp_path / "run",
            device="cpu",
            resume_from=str(tmp_path / name),
            lr=lambda step: 0.0,
        )
        result = trainer.fit(total_steps=steps)
        return (model, optimizer), result.step, capsys.readouterr().out

    return run


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())


def test_weights_alone_are_where_a_run_starts(resume: Callable[..., tuple[Made, int, str]]) -> None:
    model, _ = made()
    for content, name in (
        (model.state_dict(), "a.pth"),
        ({f"module.{k}": v for k, v in weights(model).items()}, "b.pt"),
    ):
        (resumed, _), step, said = resume(content, steps=1, name=name)
        assert step == 1 and same(model, resumed)
        assert "saved by another program, without optimizer state or a step" in said


def test_a_snapshot_of_weights_and_epochs_goes_on_in_its_epoch(resume: Callable[..., tuple[Made, int, str]]) -> None:
    model, _ = made()
    (resumed, _), step, said = resume({"MODEL_STATE": model.state_dict(), "EPOCHS_RUN": 3}, steps=16)
    assert step == 16 and same(model, resumed) and "(step 15)" in said  # 3 epochs of 5 steps


@pytest.mark.parametrize(
    ("of_model", "of_optimizer", "position"),
    [("model", "optimizer", {"step": 7}), ("model_state_dict", "optimizer_state_dict", {"iter_num": 7})],
)
def test_optimizer_state_goes_on_too(
    resume: Callable[..., tuple[Made, int, str]], of_model: str, of_optimizer: str, position: dict[str, int]
) -> None:
    model, optimizer = made()
    a_step(model, optimizer)
    content = {of_model: model.state_dict(), of_optimizer: optimizer.state_dict(), **position}
    (_, resumed), _, said = resume(content, steps=7)
    assert "(step 7)" in said and "without" not in said
    before, after = (list(each.state_dict()["state"].values()) for each in (optimizer, resumed))
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one[kind], other[kind]) for kind in ("step", "exp_avg", "exp_avg_sq"))


def refusals() -> list[tuple[Any, str]]:
    other: dict[str, Tensor] = nn.Linear(3, 1).state_dict()
    model, _ = made()
    narrow = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).state_dict()
    return [
        ({"epoch": 3, "args": "x"}, "has no weights: it has epoch, args"),
        (other, r"is from a different model: 4 tensors missing, 2 unknown"),
        (
            {"model": model.state_dict(), "optimizer": narrow},
            "the state of an optimizer of 1 parameters, this one has 4",
        ),
        ({"model": made()[0]}, "has Python objects besides tensors"),
    ]


@pytest.mark.parametrize(("content", "problem"), refusals())
def test_what_a_file_lacks_is_said_in_two_lines(
    resume: Callable[..., tuple[Made, int, str]], content: Any, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem) as raised:
        resume(content)
    assert "\n" not in raised.value.problem and raised.value.fix


def test_an_exported_file_carries_its_settings(train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run_dir", "run", "--save_every", "2", "--lr", "0.003") == 0
    assert run_command(["checkpoint", "export", "run", "--step", "4", "--out", "four.pt"]) == 0
    assert run_command(["train", "--resume_from", "four.pt", "--run_dir", "again"]) == 0
    assert "resuming from four.pt (step 4)" in capsys.readouterr().out
    assert run_command(["sample", "four.pt", "--prompt", "All", "--max_tokens", "3"]) == 0
    assert "All" in capsys.readouterr().out
    ends = [torch.load(path, weights_only=True) for path in _exported("run", "again")]
    assert all(torch.equal(tensor, ends[1]["model"][name]) for name, tensor in ends[0]["model"].items())


def _exported(*runs: str) -> list[Path]:
    for run in runs:
        assert run_command(["checkpoint", "export", run]) == 0
    return [Path(run) / "checkpoints/checkpoint_step_6.pt" for run in runs]
