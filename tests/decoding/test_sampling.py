"""Random numbers on the device: distributed as the model says, a function of seed, place and token alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drumline.decoding.sampling import choose_tokens, least_scores, noise
from drumline.decoding.state import ALL, State
from drumline.generate.limits import most_likely
from drumline.generate.sample import SampleConfig
from drumline.model.gpt import GPT, GPTConfig


def chosen(logits: Tensor, *, seeds: Tensor, draws: Tensor, temperature: float = 1.0) -> Tensor:
    rows = len(logits)
    return choose_tokens(
        logits,
        "free",
        seeds=seeds,
        draws=draws,
        temperatures=torch.full((rows,), temperature),
        top_ks=torch.full((rows,), ALL),
        top_ps=torch.ones(rows),
    )


@pytest.mark.parametrize("varied", ["seed", "place"])
def test_tokens_are_distributed_as_their_probabilities(varied: str) -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, 2.5, -8.0, 1.5])
    texts = 40_000
    numbers, zeros = torch.arange(texts), torch.zeros(texts, dtype=torch.int64)
    seeds, draws = (numbers, zeros + 3) if varied == "seed" else (zeros + 123_456_789_012, numbers)
    tokens = chosen(logits.expand(texts, -1), seeds=seeds, draws=draws, temperature=0.7)
    wanted = (logits / 0.7).softmax(dim=0) * texts
    counts = torch.bincount(tokens, minlength=8)
    assert float(((counts - wanted).square() / wanted).sum()) < 30.0  # chi-squared with 7 degrees: 1e-4 of all seeds


def test_noise_of_neighbouring_tokens_texts_and_places_is_independent() -> None:
    drawn = noise(torch.arange(64) // 8, torch.arange(64) % 8, 4096)  # (64, 4096)
    assert abs(float(drawn.mean()) - 0.5772) < 0.01 and abs(float(drawn.var()) - 1.6449) < 0.02
    between_rows = torch.corrcoef(drawn) - torch.eye(64)
    shifted = torch.corrcoef(torch.stack((drawn[:, 1:].flatten(), drawn[:, :-1].flatten())))
    assert float(between_rows.abs().max()) < 0.08 and abs(float(shifted[0, 1])) < 0.01


@given(st.integers(0, 5), st.integers(0, 2**63 - 1), st.integers(0, 1000))
@settings(max_examples=20)
def test_a_texts_noise_does_not_depend_on_its_row(row: int, seed: int, draw: int) -> None:
    seeds, draws = torch.arange(6), torch.arange(6)
    seeds[row], draws[row] = seed, draw
    alone = noise(torch.tensor([seed]), torch.tensor([draw]), 50)
    assert torch.equal(noise(seeds, draws, 50)[row], alone[0])
    assert torch.isfinite(alone).all()


@given(st.data())
@settings(max_examples=60)
def test_top_k_and_top_p_leave_the_tokens_that_they_leave_on_a_cpu(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    scores = torch.randn(3, data.draw(st.integers(1, 30))) * 3.0
    top_ks = data.draw(st.lists(st.sampled_from([None, 1, 2, 7, 1000]), min_size=3, max_size=3))
    top_ps = data.draw(st.lists(st.sampled_from([None, 0.01, 0.3, 0.9, 1.0]), min_size=3, max_size=3))
    least = least_scores(
        scores,
        torch.tensor([ALL if top_k is None else top_k for top_k in top_ks]),
        torch.tensor([1.0 if top_p is None else top_p for top_p in top_ps]),
    )
    for row, (top_k, top_p) in enumerate(zip(top_ks, top_ps, strict=True)):
        left, ids = most_likely(scores[row], SampleConfig(top_k=top_k, top_p=top_p))
        # Up to the rounding of sums, where a token is just at the limit: at 1.0 that is one of no probability.
        if top_p != 1.0:
            assert set(torch.nonzero(scores[row] >= least[row])[:, 0].tolist()) == set(ids[left > -torch.inf].tolist())


def test_seeds_of_64_bits_reach_the_device_whole() -> None:
    state = State(GPT(GPTConfig(vocab_size=8, max_position_embeddings=4, n_layers=1, n_heads=1, d_model=8, d_ff=8)), 2)
    settings = [SampleConfig(seed=2**64 - 3), SampleConfig(seed=2**62, temperature=0.5, top_k=1)]
    state.begin([1, 0], [[3, 4], [5]], settings, [0, 9])
    assert state.seeds.tolist() == [2**62, -3] and state.draws.tolist() == [9, 0]
    assert state.previous.tolist() == [5, 4] and state.lengths.tolist() == [1, 2]
    assert state.temperatures.tolist()[0] == 0.0  # one token is left: that is the most likely one
