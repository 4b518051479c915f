"""The learning rate as a pure function, and who is decayed."""

import itertools
import math

import pytest
import torch

from drumline.config import GPTConfig, OptimConfig
from drumline.model import GPT
from drumline.optim import learning_rate, make_optimizer


def curve(schedule: str, **settings: object) -> list[float]:
    optim = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=10, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, optim, total_steps=100) for step in range(101)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_every_schedule_warms_up_linearly_to_the_peak(schedule: str) -> None:
    assert curve(schedule)[:11] == pytest.approx([0.1 * n for n in range(1, 11)] + [1.0])


def test_cosine_ends_at_its_floor_and_passes_the_middle_half_way() -> None:
    values = curve("cosine", min_lr_ratio=0.2)
    assert values[55] == pytest.approx(0.6) and values[100] == pytest.approx(0.2)
    assert all(later <= earlier for earlier, later in itertools.pairwise(values[10:]))


def test_wsd_is_stable_and_then_decays_linearly() -> None:
    values = curve("wsd", decay_fraction=0.3, min_lr_ratio=0.0)
    assert set(values[10:71]) == {1.0}
    assert values[85] == pytest.approx(0.5) and values[100] == 0.0


def test_constant_stays() -> None:
    assert set(curve("constant")[10:]) == {1.0}


def test_warmup_is_a_fiftieth_of_the_run_unless_it_is_given() -> None:
    optim = OptimConfig(lr=1.0, schedule="constant")
    assert learning_rate(0, optim, total_steps=500) == pytest.approx(0.1)
    assert learning_rate(0, optim, total_steps=10) == 1.0


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = GPT(GPTConfig(vocab_size=64, max_position_embeddings=8, n_layers=1, n_heads=2, d_model=8, d_ff=16))
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5, beta1=0.8, beta2=0.7, eps=1e-3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.5 if p.dim() >= 2 else 0.0 for name, p in model.named_parameters()
    }
    assert optimizer.defaults["betas"] == (0.8, 0.7) and optimizer.defaults["eps"] == 1e-3


def test_a_frozen_parameter_is_left_out() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    assert [p.shape for group in make_optimizer(model, OptimConfig(lr=1.0)).param_groups for p in group["params"]] == [
        torch.Size([2])
    ]
    assert math.isclose(make_optimizer(model, OptimConfig(lr=1.0)).param_groups[0]["lr"], 1.0)
