"""samples.jsonl: what a model writes while it is trained, so that one sees it learn."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from drumline.config import TrainConfig
from drumline.data import Data
from drumline.files import RunFolder
from drumline.generate.sample import SampleConfig, can_write, generate
from drumline.parallel import own_pulse
from drumline.report import Records
from drumline.train import Setup

_TOKENS, _LAST_TOKENS = 48, 120
"""Of a sample at an evaluation, and at the end of a run."""


def write_sample(config: TrainConfig, data: Data, setup: Setup, records: Records, step: int) -> None:
    """The same prompt and seed at each evaluation: what differs is what the model has learned."""
    model, tokenizer, ids = setup.step.model, data.tokenizer, list[int]()
    if tokenizer is None or not can_write(model):
        return
    prompt, end = tokenizer.encode(config.records.sample_prompt), tokenizer.end_of_text
    context, settings, vocabulary = config.model.context, settings_for(config), tokenizer.vocab_size
    with uncompiled():
        for token in generate(model, prompt, settings, end_of_text=end, context=context, vocabulary=vocabulary):
            ids.append(token)
            own_pulse().still_there()
    keep_sample(setup.folder, records, config, step=step, text=tokenizer.decode(ids))


def uncompiled() -> AbstractContextManager[Any]:
    """Texts grow: to compile for their lengths takes longer than to write them, and torch compiles for few of them."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def settings_for(config: TrainConfig, *, is_last: bool = False) -> SampleConfig:
    return SampleConfig(max_tokens=_LAST_TOKENS if is_last else _TOKENS, seed=config.run.seed)


def keep_sample(folder: RunFolder, records: Records, config: TrainConfig, *, step: int, text: str) -> None:
    records.line(folder.samples, {"step": step, "prompt": config.records.sample_prompt, "text": text})
