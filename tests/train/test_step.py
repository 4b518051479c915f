"""A step clips, updates or leaves out the update the same way, whether the optimizer or the host decides it."""

import math
from collections.abc import Callable

import pytest
import torch
from helpers.steps import CPU, make_step, train_step
from torch import Tensor, nn

from drumline.train.step import StepResult, to_device

MAKERS = pytest.mark.parametrize("fused", [True, False], ids=["decided by the optimizer", "decided by the host"])


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(numbers: Tensor, optimizer: torch.optim.Optimizer) -> bool:
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    monkeypatch.setattr("drumline.train.step._may_update_unread", supports)


def model_and_step(
    *, fused: bool, grad_clip: float
) -> tuple[nn.Linear, torch.optim.Optimizer, Callable[[float], StepResult]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=fused)
    assert bool(getattr(optimizer, "_step_supports_amp_scaling", False)) == fused

    def objective(wrapped: nn.Module, factor: Tensor) -> Tensor:
        loss: Tensor = (wrapped(torch.ones(2, 4)).square() * factor).sum()
        return loss

    def step(factor: float) -> StepResult:
        whole = make_step(model, optimizer, objective, weight=2, grad_clip=grad_clip)
        return train_step(whole, [torch.tensor(factor)], lr=0.05, stop=True)

    return model, optimizer, step


@pytest.mark.parametrize("grad_clip", [0.0, 0.5, 1e6])
def test_both_ways_to_update_give_the_same_weights_and_numbers(grad_clip: float) -> None:
    (one, _, step), (other, _, other_step) = (model_and_step(fused=f, grad_clip=grad_clip) for f in (True, False))
    for factor in (1.0, 3.0, 0.1):
        results = step(factor), other_step(factor)
        assert results[0].loss == pytest.approx(results[1].loss) and results[0].updated
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm)
        assert results[0].votes == (True, False, False)
    torch.testing.assert_close(one.weight, other.weight)


@MAKERS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_change_neither_weights_nor_what_the_optimizer_remembers(
    bad: float, fused: bool
) -> None:
    disturbed, optimizer, step = model_and_step(fused=fused, grad_clip=1.0)
    undisturbed, other_optimizer, other_step = model_and_step(fused=fused, grad_clip=1.0)
    for factor in (1.0, 2.0):
        assert not step(bad).updated
        assert step(factor).updated and other_step(factor).updated
    assert torch.equal(disturbed.weight, undisturbed.weight)
    for key, value in optimizer.state[disturbed.weight].items():
        assert torch.equal(value, other_optimizer.state[undisturbed.weight][key]), key
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")


def test_a_batch_of_any_nesting_goes_to_the_device_whole() -> None:
    batch = {"a": (torch.ones(2), [torch.zeros(1), None]), "b": "text"}
    moved = to_device(batch, CPU)
    assert torch.equal(moved["a"][0], torch.ones(2)) and moved["a"][1][1] is None and moved["b"] == "text"
