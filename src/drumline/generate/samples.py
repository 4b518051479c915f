"""samples.jsonl: what a model writes while it is trained, so that one sees it learn."""

from __future__ import annotations

from torch import nn

from drumline.config import TrainConfig
from drumline.data import Tokenizer
from drumline.files import RunFolder
from drumline.generate.sample import SampleConfig, can_write, generate
from drumline.parallel import own_pulse
from drumline.report import Records

_TOKENS = 48


def write_sample(
    model: nn.Module, tokenizer: Tokenizer, folder: RunFolder, records: Records, config: TrainConfig, *, step: int
) -> None:
    """The same prompt and seed at each evaluation: what differs is what the model has learned."""
    if not can_write(model):
        return
    prompt, ids, end = config.records.sample_prompt, [], tokenizer.end_of_text
    settings = SampleConfig(max_tokens=_TOKENS, seed=config.run.seed)
    for token in generate(model, tokenizer.encode(prompt), settings, end_of_text=end, context=config.model.context):
        ids.append(token)
        own_pulse().still_there()
    records.line(folder.samples, {"step": step, "prompt": prompt, "text": tokenizer.decode(ids)})
