"""The kernels of a step equal the plain PyTorch beside them: on a GPU, or else through Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from helpers.interpreted import HAS_TRITON, INTERPRETED, MODERN, WHY_NOT
from torch import Tensor

from drumline.config.model import GPTConfig
from drumline.decoding.sampling import Kind, choose_tokens
from drumline.decoding.slots import AheadSlots
from drumline.decoding.state import State
from drumline.decoding.step import PlainStep
from drumline.generate.sample import SampleConfig
from drumline.model.gpt import GPT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_TRITON = pytest.mark.skipif(not HAS_TRITON or (DEVICE.type == "cpu" and not INTERPRETED), reason=WHY_NOT)
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # of which the interpreter makes no products
EXACT_TO = 8e-3
"""Relative error of results in half precision."""
RECIPE = replace(
    MODERN, d_model=128, tie_embeddings=False, norm_weights=False, softcap=15.0, value_tables=2, smear=True
)
SHAPES = {
    "classic": GPTConfig(vocab_size=300, max_position_embeddings=64, n_layers=2, n_heads=2, d_model=64, d_ff=96),
    "recipe": RECIPE,
    "grouped": replace(RECIPE, n_kv_heads=2, activation="swiglu", norm_weights=True, qk_norm=False, value_tables=0),
}


@pytest.fixture(scope="module")
def module() -> Callable[[str], ModuleType]:
    return lambda name: importlib.import_module(f"drumline.decoding.{name}")


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = HALF) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * std).to(DEVICE, dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).norm() / wanted.norm())


def lively(name: str) -> GPT:
    """A model in half precision, whose next tokens are clear."""
    torch.manual_seed(0)
    model = GPT(SHAPES[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.3) + (parameter.dim() == 1)
            )
            parameter.data = parameter.data.to(HALF)
    return model.to(DEVICE).eval()


@NEEDS_TRITON
@pytest.mark.parametrize("rows", [1, 18])
@pytest.mark.parametrize("norm", ["none", "rms", "learned", "layer"])
def test_a_norm_and_a_matrix_equal_the_plain_ones(module: Callable[[str], ModuleType], norm: str, rows: int) -> None:
    linear = module("linear")
    weight, learned = normal(40, 96, std=0.1), normal(96).abs() + 0.5
    means = (weight * learned).float().sum(dim=1) if norm == "layer" else None
    layer = linear.Linear(
        weight=weight,
        bias=normal(40, dtype=torch.float32),
        norm=learned if norm in ("learned", "layer") else None,
        means=means,
        eps=None if norm == "none" else 1e-5,
        softcap=2.0,
    )
    x, residual = normal(rows, 96) + 0.5, normal(rows, 40)
    for extra in (None, residual):
        got = linear.linear(x, layer, torch.empty_like(residual), residual=extra)
        assert error(got, linear.linear_reference(x, layer, residual=extra)) < EXACT_TO


@NEEDS_TRITON
@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "swiglu", "relu2"])
def test_activations_equal_the_plain_ones(module: Callable[[str], ModuleType], activation: str) -> None:
    linear = module("linear")
    gate = normal(48, 64, std=0.3) if activation == "swiglu" else None
    layer = linear.Linear(weight=normal(48, 64, std=0.2), gate=gate, eps=1e-6, activation=activation)
    x = normal(3, 64)
    got = linear.linear(x, layer, torch.empty(3, 48, dtype=HALF, device=DEVICE))
    assert error(got, linear.linear_reference(x, layer)) < EXACT_TO


@NEEDS_TRITON
@pytest.mark.parametrize("positions", [64, 512])
@pytest.mark.parametrize("full", [True, False], ids=["all parts", "bare"])
def test_attention_to_a_cache_equals_the_plain_one(
    module: Callable[[str], ModuleType], full: bool, positions: int
) -> None:
    attending = module("attending")
    cache = normal(2, 4, 2, 512, 32)
    layer = attending.Attention(
        cache=cache.clone(),
        heads=6,
        norm_eps=1e-6 if full else None,
        query_norm=normal(32).abs() if full else None,
        key_norm=normal(32).abs() + 0.5 if full else None,
        rope=torch.stack((normal(512, 16, dtype=torch.float32).cos(), normal(512, 16, dtype=torch.float32).sin()))
        if full
        else None,
        table=normal(11, 64) if full else None,
    )
    plain = replace(layer, cache=cache.clone())
    qkv, ids = normal(3, 10 * 32), torch.tensor([3, 10, 0], device=DEVICE)
    lengths = torch.tensor([0, positions - 1, 37], device=DEVICE)
    got = attending.attend(qkv, layer, normal(3, 192), lengths=lengths, ids=ids, positions=positions)
    wanted = attending.attend_reference(qkv, plain, lengths=lengths, ids=ids)
    assert error(got, wanted) < EXACT_TO and error(layer.cache, plain.cache) < EXACT_TO


@NEEDS_TRITON
@pytest.mark.parametrize("kind", ["greedy", "free", "limited"])
def test_tokens_sampled_by_kernels_are_those_sampled_by_torch(module: Callable[[str], ModuleType], kind: Kind) -> None:
    picking = module("picking")
    state = State(lively("classic"), 8)
    settings = [
        SampleConfig(temperature=0.0 if row == 2 or kind == "greedy" else 0.9, seed=row - 3)
        if kind != "limited" or row % 2
        else SampleConfig(
            temperature=1.3, seed=row << 33, top_k=[None, 5, 3000][row % 3], top_p=[0.5, None][row % 4 // 2]
        )
        for row in range(6)
    ]
    state.begin(range(6), [[5] * (row + 1) for row in range(6)], settings, [row * 7 for row in range(6)])
    state.ready[:5] = True
    logits = normal(6, 2500, std=3.0, dtype=torch.float32)
    names = ("seeds", "draws", "temperatures", "top_ks", "top_ps")
    wanted = choose_tokens(logits[:, :2400], kind, **{name: getattr(state, name)[:6] for name in names})
    lengths = state.lengths.clone()
    picking.pick(logits, kind, state, vocabulary=2400)
    assert state.ids.tolist() == [*wanted[:5].tolist(), 0, 0, 0]
    assert (state.lengths - lengths).tolist() == [1] * 5 + [0] * 3


@NEEDS_TRITON
@pytest.mark.parametrize("name", SHAPES)
def test_a_step_with_kernels_computes_what_a_plain_one_does(module: Callable[[str], ModuleType], name: str) -> None:
    fused = module("fused")
    model = lively(name)
    assert fused.fits(model)
    slots = AheadSlots(model, 3, fused=False)
    state = slots._state
    with torch.no_grad():
        slots.begin([0, 1, 2], [[5, 6, 7], [8], [9] * 20], [SampleConfig(temperature=0.0)] * 3, [0, 0, 0])
        state.ready[:] = True
        before = [tensor.clone() for tensor in (state.cache, *state.per_slot)]
        wanted = PlainStep(model, state, vocabulary=290)(3, 64, "greedy")
        for there, saved in zip((state.cache, *state.per_slot), before, strict=True):
            there.copy_(saved)
        got = fused.FusedStep(model, state, vocabulary=290)(3, 64, "greedy")
    assert got.shape == wanted.shape and error(got, wanted) < 0.03
    assert state.lengths.tolist() == [4, 2, 21] and state.previous.tolist() == before[1].tolist()
