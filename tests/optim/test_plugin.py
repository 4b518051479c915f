"""An optimizer of the user's own is called as CONTRIBUTING.md says, and one that cannot be is refused in two lines."""

from collections.abc import Callable
from pathlib import Path

import pytest

Train = Callable[..., int]

MODULE = """
import torch

def good(model, optim):
    return torch.optim.SGD(model.parameters(), lr=optim.lr)

def takes_too_little(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def makes_none(model, optim):
    return 5
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_optimizers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_run_trains_with_it(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--optimizer", "my_optimizers:good", "--run_dir", "run") == 0
    assert "by my_optimizers:good" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("takes_too_little", "cannot be called with a model and an OptimConfig: too many positional arguments"),
        ("makes_none", "returned int, not a torch.optim.Optimizer"),
        ("not_there", "the module my_optimizers has no function not_there"),
    ],
)
def test_one_that_cannot_be_used_is_refused(
    train: Train, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    assert train("--optimizer", f"my_optimizers:{name}", "--run_dir", "run") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and problem in said and len(said.splitlines()) == 2
