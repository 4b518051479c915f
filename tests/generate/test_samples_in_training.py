"""samples.jsonl: the same prompt and seed at each evaluation, and training is not disturbed by it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from drumline.config import GPTConfig, TrainConfig
from drumline.data import Tokenizer
from drumline.files import RunFolder
from drumline.generate import write_sample
from drumline.model import GPT
from drumline.report import Records


def write(
    model: nn.Module, tokenizer: Tokenizer, folder: RunFolder, records: Records, config: TrainConfig, step: int
) -> None:
    setup: Any = SimpleNamespace(step=SimpleNamespace(model=model), folder=folder)
    data: Any = SimpleNamespace(tokenizer=tokenizer)
    write_sample(config, data, setup, records, step)


def test_samples_differ_only_by_what_the_model_has_learned_and_leave_it_as_it_was(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a drum and a drummer drum on a drum " * 20], vocab_size=270)
    model = GPT(
        GPTConfig(
            vocab_size=tokenizer.vocab_size, max_position_embeddings=16, n_layers=1, n_heads=4, d_model=32, d_ff=64
        )
    )
    model.train()
    config = TrainConfig()
    config = replace(config, records=replace(config.records, sample_prompt="a drum"))
    folder, records = RunFolder(tmp_path), Records([], log=None, silent=True)
    state = torch.get_rng_state()
    for step in (1, 2):
        write(model, tokenizer, folder, records, config, step)
    assert model.training and torch.equal(state, torch.get_rng_state())
    with torch.no_grad():
        nn.init.normal_(model.token_embedding.weight)
    write(model, tokenizer, folder, records, config, 3)
    assert records.flush()
    first, second, third = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    assert [first["step"], third["step"], first["prompt"]] == [1, 3, "a drum"]
    assert first["text"] == second["text"] != third["text"]


def test_a_model_without_logits_has_no_samples(tmp_path: Path) -> None:
    class Silent(nn.Module):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> None: ...

    folder, records = RunFolder(tmp_path), Records([], log=None, silent=True)
    write(Silent(), Tokenizer.train(["text"], vocab_size=260), folder, records, TrainConfig(), 1)
    assert records.flush() and not folder.samples.exists()
