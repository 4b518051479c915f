"""A folder of Hugging Face in use without a run: to sample from it, to talk to it, or to evaluate it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from drumline.config import TrainConfig, with_preset
from drumline.data import Tokenizer
from drumline.files import RunFolder
from drumline.generate import LoadedRun
from drumline.huggingface.importing import reader
from drumline.huggingface.sources import open_source
from drumline.model import GPT, uninitialized


def load_model(path: Path) -> LoadedRun:
    """The model of a folder, as `drumline import` would make a run of it; nothing is written."""
    source = open_source(str(path))
    settings = TrainConfig()
    settings = replace(settings, model=replace(settings.model, init_from=str(path)))
    if source.tokenizer is None:
        settings = replace(settings, data=replace(settings.data, train_data_path="tokens.bin"))
    config = with_preset(settings)
    positions = min(config.model.context or 1, source.config.max_position_embeddings)
    shape = replace(source.config, max_position_embeddings=positions)
    model, _ = uninitialized(lambda: GPT(shape), torch.device("cpu"))
    read = reader(source)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(read(name, tuple(tensor.shape)))
    tokenizer = None if source.tokenizer is None else Tokenizer.load(source.tokenizer)
    vocab_size = source.config.vocab_size if tokenizer is None else tokenizer.vocab_size
    return LoadedRun(RunFolder(path), config, 0, model, tokenizer, vocab_size)
