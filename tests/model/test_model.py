"""The model: what it computes, against transformers' implementations and against itself."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.twins import gpt2_twin, qwen3_twin
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drumline.config.model import GPTConfig
from drumline.errors import ConfigError
from drumline.generate.sample import SampleConfig, generate
from drumline.model.flops import flops_per_token, num_parameters
from drumline.model.gpt import GPT, KVCache

CLASSIC = GPTConfig(vocab_size=97, max_position_embeddings=32, n_layers=2, n_heads=4, d_model=32, d_ff=80)
MODERN = replace(
    CLASSIC,
    n_kv_heads=2,
    positions="rope",
    norm="rmsnorm",
    activation="swiglu",
    qk_norm=True,
    bias=False,
    tie_embeddings=False,
)
RELU2 = replace(MODERN, activation="relu2", n_kv_heads=None)
RECIPE = replace(MODERN, init="zero", norm_weights=False, softcap=15.0, value_tables=3, smear=True)
FAMILIES = pytest.mark.parametrize(
    "config", [CLASSIC, MODERN, RELU2, RECIPE], ids=["classic", "modern", "relu2", "recipe"]
)
OPTIONS: dict[str, Any] = {"init": "zero", "norm_weights": False, "softcap": 2.0, "value_tables": 2, "smear": True}


def random_gpt(config: GPTConfig) -> GPT:
    """A GPT in which every weight matters: norms, biases and small projections are drawn too."""
    torch.manual_seed(1)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tokens(batch: int, length: int, *, seed: int = 2) -> Tensor:
    return torch.randint(CLASSIC.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits_of(model: GPT, input_ids: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        logits, _ = model(input_ids, **arguments)
    assert isinstance(logits, Tensor)
    return logits


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    assert (ours - theirs).abs().max().item() < tolerance


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_classic_family_is_the_function_of_transformers_gpt2(attention: str) -> None:
    model, ids = random_gpt(CLASSIC), tokens(3, 32)
    labels = ids.masked_fill(tokens(3, 32, seed=3) < 30, -100)
    with torch.no_grad():
        theirs = gpt2_twin(model, attention)(ids, labels=labels)
        logits, loss = model(ids, labels=labels)
    assert_close(logits, theirs.logits)
    assert_close(loss, theirs.loss)


def test_the_modern_family_is_the_function_of_transformers_qwen3() -> None:
    model, ids = random_gpt(MODERN), tokens(3, 32)
    with torch.no_grad():
        assert_close(logits_of(model, ids), qwen3_twin(model)(ids).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_treated_as_transformers_gpt2_treats_it(side: str) -> None:
    model, ids = random_gpt(CLASSIC), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask = mask if side == "left" else mask.flip(1)
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = gpt2_twin(model, "eager")(ids, attention_mask=mask, position_ids=position_ids).logits
    assert_close(logits_of(model, ids, attention_mask=mask)[mask == 1], theirs[mask == 1])


@FAMILIES
@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 20), before=st.integers(0, 6), after=st.integers(0, 6))
def test_padding_changes_nothing_at_real_positions(config: GPTConfig, length: int, before: int, after: int) -> None:
    model, ids = random_gpt(config), tokens(1, length)
    padded = torch.nn.functional.pad(ids, (before, after), value=7)
    mask = torch.nn.functional.pad(torch.ones_like(ids), (before, after))
    logits = logits_of(model, padded, attention_mask=mask)
    assert logits.isfinite().all()
    assert_close(logits[:, before : before + length], logits_of(model, ids), 5e-5)


@FAMILIES
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=3))
def test_a_packed_document_reads_as_if_it_stood_alone(config: GPTConfig, lengths: list[int]) -> None:
    model = random_gpt(config)
    documents = [tokens(1, length, seed=length) for length in lengths]
    ids = torch.cat(documents, dim=1)
    document_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    packed = torch.split(logits_of(model, ids, document_ids=document_ids), lengths, dim=1)
    for document, logits in zip(documents, packed, strict=True):
        assert_close(logits, logits_of(model, document), 5e-5)


@FAMILIES
def test_padding_and_documents_can_be_combined(config: GPTConfig) -> None:
    model, ids = random_gpt(config), tokens(1, 10)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])
    document_ids = torch.tensor([[-1, -1, -1, -1, -1, -1, -1, 4, 4, 4]])
    logits = logits_of(model, ids, attention_mask=mask, document_ids=document_ids)
    assert_close(logits[:, 3:7], logits_of(model, ids[:, 3:7]), 5e-5)
    assert_close(logits[:, 7:], logits_of(model, ids[:, 7:]), 5e-5)


@FAMILIES
@settings(max_examples=10, deadline=None)
@given(place=st.integers(0, 19))
def test_a_token_changes_no_logits_before_it_and_some_from_it_on(config: GPTConfig, place: int) -> None:
    model, ids = random_gpt(config), tokens(1, 20)
    changed = ids.clone()
    changed[0, place] = (ids[0, place] + 1) % config.vocab_size
    before, after = logits_of(model, ids), logits_of(model, changed)
    assert torch.equal(before[:, :place], after[:, :place])
    assert not torch.equal(before[:, place], after[:, place])


def test_shared_key_value_heads_are_the_same_as_repeated_ones() -> None:
    shared, full = random_gpt(MODERN), GPT(replace(MODERN, n_kv_heads=None)).eval()
    weights = shared.state_dict()
    width = MODERN.kv_heads * MODERN.head_width
    for name in [name for name in weights if name.endswith("qkv.weight")]:
        q, *rest = weights[name].split((MODERN.d_model, width, width))
        heads = [part.unflatten(0, (MODERN.kv_heads, -1)).repeat_interleave(2, dim=0).flatten(0, 1) for part in rest]
        weights[name] = torch.cat((q, *heads))
    full.load_state_dict(weights)
    assert_close(logits_of(shared, tokens(2, 16)), logits_of(full, tokens(2, 16)))


@FAMILIES
def test_a_cache_fed_in_pieces_gives_the_logits_of_the_whole(config: GPTConfig) -> None:
    model, ids = random_gpt(config), tokens(2, 20)
    cache = KVCache(model, batch_size=2)
    pieces = [logits_of(model, piece, cache=cache) for piece in torch.split(ids, [9, 1, 1, 5, 1, 3], dim=1)]
    assert cache.length == 20
    assert_close(torch.cat(pieces, dim=1), logits_of(model, ids), 5e-5)


@FAMILIES
def test_targets_give_the_sum_whose_mean_the_labels_give(config: GPTConfig) -> None:
    model, ids = random_gpt(config), tokens(40, 20)  # 800 rows: more than one part
    labels = ids.masked_fill(tokens(40, 20, seed=3) < 30, -100)
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    logits, mean = model(ids, labels=labels)
    nothing, total = model(ids, targets=targets)
    assert logits is not None and nothing is None
    assert total.dtype is torch.float32
    torch.testing.assert_close(total, mean * (targets != -100).sum())


@FAMILIES
def test_every_weight_gets_a_gradient_and_only_weights_are_saved(config: GPTConfig) -> None:
    model = random_gpt(config).train()
    _, loss = model(tokens(2, 16), targets=tokens(2, 16, seed=5))
    loss.backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert still == []
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_a_new_model_starts_near_uniform_with_small_residual_projections() -> None:
    torch.manual_seed(0)
    config = replace(CLASSIC, n_layers=8, d_model=128, d_ff=512)
    model = GPT(config)
    weights = model.state_dict()
    assert weights["blocks.0.attention.qkv.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.7.attention.out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert weights["blocks.0.feed_forward.down.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert all(weight.abs().max() == 0 for name, weight in weights.items() if name.endswith("bias"))
    _, loss = model(tokens(4, 32), labels=tokens(4, 32))
    assert loss.item() == pytest.approx(torch.tensor(97.0).log().item(), abs=0.1)


def test_with_zero_init_the_residual_stream_starts_as_the_embedding_and_all_tokens_are_alike() -> None:
    torch.manual_seed(0)
    model, ids = GPT(RECIPE), tokens(2, 16)
    with torch.no_grad():
        embedded = torch.nn.functional.rms_norm(model.embedded(ids, None, None), (32,), eps=1e-6)
        assert_close(model.hidden(ids), embedded)
    assert model.token_embedding.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert logits_of(model, ids).abs().max() == 0
    tied = GPT(replace(RECIPE, tie_embeddings=True))
    assert tied.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    moved = {name for name, weight in model.named_parameters() if weight.abs().max() > 0}
    assert not any(name.endswith(("out.weight", "down.weight", "head.weight")) or "value" in name for name in moved)


def test_without_norm_weights_norms_have_nothing_to_learn_and_scale_as_before() -> None:
    for config in (CLASSIC, MODERN):
        bare = GPT(replace(config, norm_weights=False)).eval()
        full = GPT(config).eval()
        assert not [name for name, _ in bare.named_parameters() if "norm" in name]
        full.load_state_dict(bare.state_dict(), strict=False)  # whose norms are still ones and zeros
        assert_close(logits_of(bare, tokens(2, 12)), logits_of(full, tokens(2, 12)))


def test_capped_logits_stay_below_the_cap_in_the_same_order_in_both_losses() -> None:
    open_, capped = random_gpt(MODERN), random_gpt(replace(MODERN, softcap=2.0))
    ids = tokens(2, 12)
    before, after = logits_of(open_, ids), logits_of(capped, ids)
    assert before.abs().max() > 2.0 > after.abs().max()
    assert_close(after, 2.0 * torch.tanh(before / 2.0))
    total = capped(ids, targets=ids)[1]
    assert_close(total, torch.nn.functional.cross_entropy(after.flatten(0, 1), ids.flatten(), reduction="sum"), 1e-3)


def test_value_tables_serve_the_first_and_the_last_layers_and_are_no_product() -> None:
    deep = replace(CLASSIC, n_layers=5)
    plain, tabled = GPT(deep), GPT(replace(deep, value_tables=2))
    values = tabled.extra_values(tokens(1, 4))
    assert sorted(values) == [0, 1, 3, 4] and values[0] is values[3] and values[1] is values[4]
    assert num_parameters(tabled) == num_parameters(plain) + 2 * 97 * 32
    assert num_parameters(tabled, embedding=False) == num_parameters(plain, embedding=False)
    assert flops_per_token(tabled, context=32) == flops_per_token(plain, context=32)
    assert len(GPT(replace(deep, n_layers=1, value_tables=3)).value_tables) == 1


def test_smeared_embeddings_have_a_share_of_the_one_before_within_a_document() -> None:
    model, ids = random_gpt(replace(CLASSIC, smear=True)), torch.tensor([[5, 6, 7], [9, 6, 7]])
    assert model.smear is not None
    with torch.no_grad():
        alone = model.look_up(ids, model.token_embedding.weight)
        smeared = model.embedded(ids, None, None) - alone
        apart = model.embedded(ids, torch.tensor([[0, 1, 1], [0, 0, 1]]), None) - alone
        share = model.smear * alone
    assert not smeared[:, 0].any()
    assert_close(smeared[:, 1:], share[:, :2])
    assert not apart[0, :2].any() and not apart[1, ::2].any()
    assert_close(apart[0, 2], share[0, 1])
    assert_close(apart[1, 1], share[1, 0])


@pytest.mark.parametrize("option", OPTIONS)
@FAMILIES
def test_each_option_changes_the_model_and_samples_alike_with_and_without_the_cache(
    config: GPTConfig, option: str
) -> None:
    off = {name: getattr(GPTConfig(), name) for name in OPTIONS}
    without = replace(config, **off)
    changed = random_gpt(replace(without, **{option: OPTIONS[option]}))
    ids = tokens(1, 8)
    assert not torch.equal(logits_of(random_gpt(without), ids), logits_of(changed, ids))
    settings_ = SampleConfig(max_tokens=40, temperature=0.0)  # past the 32 positions
    cached, recomputed = (
        list(generate(changed, [1, 2, 3], settings_, end_of_text=None, use_cache=use_cache))
        for use_cache in (True, False)
    )
    assert cached == recomputed and len(cached) == 40


@FAMILIES
def test_dropout_acts_while_training_only(config: GPTConfig) -> None:
    model, ids = random_gpt(replace(config, dropout=0.2)), tokens(1, 8)
    assert torch.equal(logits_of(model, ids), logits_of(model, ids))
    assert torch.equal(logits_of(model, ids), logits_of(random_gpt(config), ids))
    model.train()
    assert not torch.equal(logits_of(model, ids), logits_of(model, ids))


def test_the_default_is_gpt2_with_124_million_parameters() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert num_parameters(model) == 124_439_808
    assert num_parameters(model, embedding=False) == 124_439_808 - (50257 + 1024) * 768
    expected = 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    assert flops_per_token(model, context=1024) == expected


def test_an_untied_head_counts_as_weights_of_a_product() -> None:
    tied, untied = GPT(replace(MODERN, tie_embeddings=True)), GPT(MODERN)
    assert num_parameters(untied) == num_parameters(tied) + 97 * 32
    assert flops_per_token(untied, context=32) == flops_per_token(tied, context=32)


@FAMILIES
def test_a_sequence_longer_than_the_model_is_refused_with_both_numbers(config: GPTConfig) -> None:
    with pytest.raises(ConfigError, match=r"33 tokens .* 32 positions"):
        logits_of(GPT(config), tokens(1, 33))


def test_arguments_that_contradict_each_other_are_refused() -> None:
    model, ids = GPT(CLASSIC), tokens(1, 4)
    with pytest.raises(ConfigError, match="both labels and targets"):
        model(ids, labels=ids, targets=ids)
    with pytest.raises(ConfigError, match="cache"):
        model(ids, attention_mask=torch.ones_like(ids), cache=KVCache(model))


BFLOAT16 = """
import warnings, torch
from drumline.model.gpt import GPT
from drumline.config.model import GPTConfig
warnings.simplefilter("error")
modern = dict(positions="rope", norm="rmsnorm", activation="swiglu", qk_norm=True, bias=False, n_kv_heads=2)
recipe = dict(modern, tie_embeddings=False, norm_weights=False, softcap=15.0, value_tables=1)
for family in ({}, modern, recipe):
    model = GPT(GPTConfig(vocab_size=97, n_layers=2, n_heads=4, d_model=32, d_ff=80, **family))
    ids = torch.arange(60).view(2, 30)
    exact = model(ids, targets=ids)[1]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)[0]
        loss = model(ids, targets=ids)[1]
    assert logits.dtype is torch.bfloat16 and loss.dtype is torch.float32
    assert abs(loss / exact - 1) < 0.01, (loss, exact)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
"""


def test_bfloat16_autocast_gives_nearly_the_same_loss_and_no_warning() -> None:
    # In a process of its own: virtual machines exist that announce AMX and then trap on it, which kills the process.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run(
        [sys.executable, "-c", BFLOAT16], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
