"""How weights lie in memory changes how fast they are read, and no text."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.small import small

from drumline.cli.app import run_command
from drumline.config.model import GPTConfig
from drumline.generate import storing
from drumline.generate.engine import Reason, Request, Scored, make_engine
from drumline.generate.sample import SampleConfig, generate
from drumline.generate.storing import PackedLinear, can_pack, store_by_columns, store_packed
from drumline.model.gpt import GPT

CLASSIC = GPTConfig(vocab_size=61, max_position_embeddings=16, n_layers=2, n_heads=4, d_model=32, d_ff=64)
MODERN = replace(CLASSIC, n_kv_heads=2, positions="rope", norm="rmsnorm", activation="swiglu", qk_norm=True, bias=False)
RECIPE = replace(
    MODERN,
    activation="relu2",
    smear=True,
    value_tables=1,
    softcap=15.0,
    norm_weights=False,
    tie_embeddings=False,
)
CONFIGS = pytest.mark.parametrize("config", [CLASSIC, MODERN, RECIPE], ids=["classic", "modern", "recipe"])
GREEDY = SampleConfig(temperature=0.0, max_tokens=40)
pytestmark = pytest.mark.skipif(not can_pack(), reason="needs an x86 CPU and a torch with oneDNN")


class Ids:
    """A reader that keeps the ids."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def prompt_scored(self, tokens: list[Scored]) -> None:
        """Not asked for."""

    def token(self, token: Scored) -> bool:
        self.ids.append(token.token)
        return True

    def ended(self, reason: Reason, token: Scored | None) -> None:
        """All are there."""


def lively(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.05))
    return model


def packed(model: GPT) -> GPT:
    made = copy.deepcopy(model)
    store_packed(made)
    return made


@pytest.mark.parametrize("shape", [(13,), (1, 13), (5, 13), (2, 3, 13), (300, 13)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_multiply_as_they_did(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(13, 7, bias=bias), torch.randn(shape)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(x), linear(x).detach())
    stretched = torch.randn(4, 5, 13)[:, -1]
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(stretched), linear(stretched).detach())


@CONFIGS
def test_a_packed_model_writes_the_same_greedy_texts_alone_and_together(config: GPTConfig) -> None:
    model = lively(config)
    other = packed(model)
    prompts = [[(7 * i + 3) % 61 for i in range(length)] for length in (1, 7, 7, 16, 40)]
    expected = [list(generate(model, prompt, GREEDY, end_of_text=None)) for prompt in prompts]
    assert [list(generate(other, prompt, GREEDY, end_of_text=None)) for prompt in prompts] == expected
    engine, readers = make_engine(other, slots=4, context=16, ends=()), [Ids() for _ in prompts]
    for prompt, reader in zip(prompts, readers, strict=True):
        engine.submit(Request(prompt=prompt, settings=GREEDY, max_tokens=40, reader=reader))
    while engine.active or engine.waiting:
        engine.step()
    assert [reader.ids for reader in readers] == expected
    assert len({token for ids in expected for token in ids}) > 5


@CONFIGS
def test_a_packed_model_keeps_no_second_copy_of_its_matrices(config: GPTConfig) -> None:
    other = packed(lively(config))
    large = {name for name, parameter in other.named_parameters() if parameter.dim() > 1}
    assert large == {name for name in large if "embedding" in name or "tables" in name}
    assert other.token_embedding.weight.shape == (61, 32)


def test_text_of_a_run_is_the_same_packed_and_by_columns(
    here: Path, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = small("--train_data_path", str(text), "--run_dir", "run", "--total_steps", "20")
    assert run_command(["train", *flags]) == 0
    words = ["sample", "run", "--prompt", "All work", "--temperature", "0", "--max_tokens", "30", "--device", "cpu"]

    def sampled() -> str:
        capsys.readouterr()
        assert run_command(words) == 0
        return capsys.readouterr().out

    ways: list[str] = []

    def counted(way: Callable[[GPT], None]) -> Callable[[GPT], None]:
        return lambda model: (ways.append(way.__name__), way(model))[1]

    for way in (store_packed, store_by_columns):
        monkeypatch.setattr(storing, way.__name__, counted(way))
    first = sampled()
    monkeypatch.setattr(storing, "can_pack", lambda: False)
    assert sampled() == first and first.startswith("All work")
    assert ways == ["store_packed", "store_by_columns"]
