"""The learning rate as a pure function; which weights are trained by what, at which rate, and decayed."""

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.steps import make_step, train_step

from drumline.config.model import GPTConfig
from drumline.config.settings import OptimConfig
from drumline.model.gpt import GPT
from drumline.optim.muon import Muon
from drumline.optim.optimizers import learning_rate, make_optimizer, parameters_by_kind


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


def gpt(**settings: Any) -> GPT:
    shape = {"vocab_size": 64, "max_position_embeddings": 8, "n_layers": 1, "n_heads": 2, "d_model": 8, "d_ff": 16}
    return GPT(GPTConfig(**{**shape, **settings}))


def test_each_kind_of_weight_has_its_own_rate_and_all_follow_one_schedule() -> None:
    model = gpt(tie_embeddings=False, value_tables=1)
    optim = OptimConfig(lr=0.02, optimizer="muon", embedding_lr=0.3, head_lr=0.004)
    optimizer = make_optimizer(model, optim)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    rate_of = {name: rates[id(p)] for name, p in model.named_parameters()}
    assert {name: rate for name, rate in rate_of.items() if "embedding" in name or "table" in name} == dict.fromkeys(
        ("token_embedding.weight", "position_embedding.weight", "value_tables.0.weight"), 0.3
    )
    assert rate_of["head.weight"] == rate_of["final_norm.weight"] == rate_of["blocks.0.attention.out.bias"] == 0.004
    assert {rate_of[f"blocks.0.{name}.weight"] for name in ("attention.qkv", "feed_forward.down")} == {0.02}
    before = {id(p): group["lr_ratio"] for group in optimizer.param_groups[1:] for p in group["params"]}
    assert all(rates[p] == pytest.approx(0.02 * ratio) for p, ratio in before.items())
    train_step(make_step(model, optimizer, _loss, weight=8), [torch.arange(8)[None]], lr=0.01)
    assert {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]} == pytest.approx(
        {p: rate / 2 for p, rate in rates.items()}
    )


def _loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids, targets=ids)[1]
    return loss


def test_a_tied_embedding_is_trained_as_the_head_it_is() -> None:
    model = gpt()
    kinds = parameters_by_kind(model)
    assert [id(p) for p in kinds["head"]] == [id(model.token_embedding.weight)] and len(kinds["embeddings"]) == 1


def test_muon_takes_the_matrices_and_a_model_without_any_is_adamws() -> None:
    optimizer = make_optimizer(gpt(), OptimConfig(lr=0.1, optimizer="muon"))
    assert isinstance(optimizer, Muon) and {p.dim() for p in optimizer.param_groups[0]["params"]} == {2}
    norm = torch.nn.LayerNorm(4)
    assert isinstance(make_optimizer(norm, OptimConfig(lr=0.1, optimizer="muon")), torch.optim.AdamW)


def test_kernels_of_more_than_two_dimensions_are_decayed_and_left_to_adamw() -> None:
    convolution = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    groups = make_optimizer(convolution, OptimConfig(lr=0.1, optimizer="muon", weight_decay=0.5)).param_groups
    assert {p.dim(): group["weight_decay"] for group in groups for p in group["params"]} == {2: 0.5, 4: 0.5, 1: 0.0}
