"""Generation: the same text with and without a cache, and draws that follow the settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.config.model import GPTConfig
from drumline.errors import ConfigError, DataError
from drumline.generate.sample import SampleConfig, choose, generate
from drumline.generate.streaming import check_prompt
from drumline.model.gpt import GPT

CLASSIC = GPTConfig(
    vocab_size=61, max_position_embeddings=16, n_layers=2, n_heads=4, d_model=32, d_ff=64, tie_embeddings=False
)
MODERN = replace(CLASSIC, n_kv_heads=2, positions="rope", norm="rmsnorm", activation="swiglu", qk_norm=True, bias=False)
FAMILIES = pytest.mark.parametrize("config", [CLASSIC, MODERN], ids=["classic", "modern"])
GREEDY = SampleConfig(temperature=0.0, max_tokens=60)


def lively_gpt(config: GPTConfig) -> GPT:
    """Weights large enough that the likeliest token depends on all that came before."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() > 1):
            matrix.copy_(torch.randn_like(matrix) * 0.3)
    return model


def text(model: GPT, prompt: list[int], config: SampleConfig, **arguments: Any) -> list[int]:
    return list(generate(model, prompt, config, **{"end_of_text": None, **arguments}))


def probabilities(**wanted: float) -> torch.Tensor:
    return torch.tensor([wanted.get(f"p{i}", 0.0) for i in range(6)])


def drawn(logits: torch.Tensor, config: SampleConfig, *, times: int = 400) -> torch.Tensor:
    """How often each id is drawn."""
    generator = torch.Generator().manual_seed(0)
    ids = [choose(logits, config, generator) for _ in range(times)]
    return torch.bincount(torch.tensor(ids), minlength=len(logits)) / times


@FAMILIES
@pytest.mark.parametrize("prompt_length", [1, 7, 16, 40])
def test_greedy_text_with_a_cache_is_the_recomputed_text_far_past_the_context(
    config: GPTConfig, prompt_length: int
) -> None:
    model = lively_gpt(config)
    prompt = [(7 * i + 3) % 61 for i in range(prompt_length)]
    cached = text(model, prompt, GREEDY)
    assert cached == text(model, prompt, GREEDY, use_cache=False)
    assert len(cached) == 60 and len(set(cached)) > 15


def test_a_context_of_one_token_still_makes_text() -> None:
    model = lively_gpt(replace(CLASSIC, max_position_embeddings=1))
    assert text(model, [3], GREEDY) == text(model, [3], GREEDY, use_cache=False)


def test_a_seed_decides_the_text_whatever_else_is_drawn() -> None:
    model, config = lively_gpt(CLASSIC), SampleConfig(temperature=2.0, max_tokens=30, seed=5)
    first = text(model, [1], config)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert text(model, [1], config) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert text(model, [1], replace(config, seed=6)) != first


def test_text_stops_before_end_of_text() -> None:
    model = lively_gpt(CLASSIC)
    free = text(model, [1], GREEDY)
    end = free[10]
    assert text(model, [1], GREEDY, end_of_text=end) == free[: free.index(end)]


def test_an_empty_prompt_starts_from_end_of_text_or_from_zero() -> None:
    model, config = lively_gpt(CLASSIC), SampleConfig(temperature=0.0, max_tokens=3)
    assert text(model, [], config, end_of_text=60) == text(model, [60], config, end_of_text=60)
    assert text(model, [], config) == text(model, [0], config)


def test_dropout_is_off_while_sampling_and_the_models_mode_comes_back() -> None:
    model = lively_gpt(replace(CLASSIC, dropout=0.5)).train()
    assert text(model, [1], GREEDY) == text(model, [1], GREEDY)
    assert model.training
    abandoned = generate(model, [1], GREEDY, end_of_text=None)
    next(abandoned)
    assert not torch.is_inference_mode_enabled()
    abandoned.close()  # type: ignore[attr-defined]
    assert model.training


@given(scale=st.floats(0.1, 30.0), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_zero_a_tiny_temperature_one_candidate_and_a_tiny_top_p_all_take_the_likeliest(scale: float, seed: int) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * scale
    likeliest = int(logits.argmax())
    for config in (
        SampleConfig(temperature=0.0),
        SampleConfig(temperature=1e-46),
        SampleConfig(top_k=1),
        SampleConfig(top_p=1e-9),
    ):
        assert choose(logits, config, torch.Generator().manual_seed(seed)) == likeliest


def test_top_k_keeps_exactly_that_many_even_among_equals() -> None:
    often = drawn(torch.zeros(6), SampleConfig(temperature=1.0, top_k=2))
    assert (often > 0).sum() == 2


def test_top_p_keeps_the_likeliest_that_reach_it_after_top_k() -> None:
    logits = probabilities(p0=0.1, p2=0.4, p3=0.2, p5=0.3).log()
    config = SampleConfig(temperature=1.0, top_p=0.65)
    assert (drawn(logits, config) > 0).tolist() == [False, False, True, False, False, True]
    # Among the top two, 0.4 and 0.3 weigh 4/7 and 3/7: the first alone reaches 0.5.
    assert drawn(logits, replace(config, top_k=2, top_p=0.5))[2] == 1.0


@pytest.mark.parametrize("config", [SampleConfig(temperature=1.0), SampleConfig(temperature=1.0, top_k=100, top_p=1.0)])
def test_tokens_are_drawn_as_often_as_the_model_says(config: SampleConfig) -> None:
    wanted = probabilities(p0=0.5, p1=0.3, p4=0.2)
    assert (drawn(wanted.log(), config, times=2000) - wanted).abs().max() < 0.04


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_tokens", 0),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_and_number(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} {value}.*\n.*--{name}"):
        SampleConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("stranger", [61, -1])
def test_a_prompt_of_another_tokenizer_is_refused(stranger: int) -> None:
    with pytest.raises(DataError, match=f"token {stranger}, .* 0 to 60"):
        check_prompt([1, stranger], vocab_size=61)
