"""Activation checkpointing: the same bits with less memory."""

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small import small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drumline.cli.app import run_command
from drumline.config import ModelSettings, TrainConfig, with_preset
from drumline.kernels.gpt import FUSED, with_kernels
from drumline.model import build_model, token_objective

HOWS = ("block", "selective")
DEEP = "--n_layers 3 --dropout 0.1 --global_batch_size 8 --bitwise".split()


def config(how: Any, **options: Any) -> TrainConfig:
    shape = {"n_layers": 8, "n_heads": 4, "d_model": 64, "d_ff": 256, "context": 256, **options}
    made = TrainConfig(model=ModelSettings(**shape))
    return with_preset(replace(made, run=replace(made.run, activation_checkpointing=how)))


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are there, but for those that were there before."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.bytes, self._known = 0, known

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in tree_leaves(made) if isinstance(each, torch.Tensor)):
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.bytes -= size


def kept_bytes(how: str, **options: Any) -> int:
    """What forward keeps for backward."""
    model = build_model(config(how, **options), vocab_size=64)
    tokens = torch.randint(0, 64, (2, 256))
    with Live({p.untyped_storage()._cdata for p in model.parameters()}) as live:
        loss = token_objective(model, (tokens, tokens, None))
        kept = live.bytes
    loss.backward()
    return kept


@pytest.mark.parametrize("preset", ["tiny", "modern-tiny", "llama-1b"])
def test_a_block_keeps_its_input_and_selective_ones_their_products(preset: str) -> None:
    whole, block, selective = (kept_bytes(how, preset=preset, n_kv_heads=2) for how in ("none", *HOWS))
    assert block < whole / 4 < whole / 3 < selective < 0.75 * whole


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("preset", ["tiny", "modern-tiny"])
def test_activations_that_are_computed_again_give_the_same_bits(how: str, preset: str, here: Path) -> None:
    hashes = []
    for name, flags in (("plain", []), ("again", ["--activation_checkpointing", how])):
        assert run_command(["train", *small("--preset", preset, *DEEP, "--run_dir", name, *flags)]) == 0
        hashes.append(json.loads((here / name / "status.json").read_text())["weights_sha256"])
    assert hashes[0] == hashes[1]


def test_a_run_may_go_on_with_another_choice(here: Path) -> None:
    assert run_command(["train", *small("--run_dir", "run", "--total_steps", "3")]) == 0
    flags = "--total_steps 6 --allow_change total_steps --activation_checkpointing block".split()
    assert run_command(["train", "--run_dir", "run", *flags]) == 0


def test_a_model_of_ones_own_is_refused_with_two_lines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "drumline.model.gpt:GPT", "--activation_checkpointing", "block"]
    assert run_command(["train", *small(*flags)]) == 1
    error, fix = capsys.readouterr().err.splitlines()
    assert "--activation_checkpointing block is for drumline's own GPT, not for --model drumline.model.gpt:GPT" in error
    assert "torch.utils.checkpoint" in fix


def test_a_dry_run_knows_what_it_saves(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for how in ("none", "selective", "block"):
        flags = f"--preset gpt2 --vocab_size 300 --device cpu --activation_checkpointing {how}"
        assert run_command(["train", "--dry_run", *flags.split()]) == 0
        (found,) = re.findall(r"([\d.]+) gradients and activations", "".join(capsys.readouterr()))
        sizes.append(float(found))
    assert sizes[0] > 1.3 * sizes[1] > 1.3 * 1.5 * sizes[2]


def test_the_kernels_keep_away_from_activations_that_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.kernels.gpt.has_kernels", lambda device: True)
    gpu = torch.device("cuda")
    assert with_kernels(config("none"), gpu).model.model == FUSED
    assert [with_kernels(config(how), gpu).model.model for how in HOWS] == ["gpt", "gpt"]
