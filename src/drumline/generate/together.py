"""Texts of a sharded model: all ranks compute each token, and rank 0 chooses it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from drumline.config import TrainConfig
from drumline.data import Data
from drumline.generate.sample import SampleConfig, can_write, choose
from drumline.generate.samples import keep_sample, settings_for
from drumline.model import GPT
from drumline.parallel import World, own_pulse, waiting_for
from drumline.report import Records, Sparing
from drumline.sharding import inside
from drumline.train import Precision, Setup

_MOST_S = 2.0
"""A sample ends after that: where weights are gathered slowly, each token takes long."""


def written_together(config: TrainConfig, data: Data, setup: Setup, records: Records) -> Callable[[int], None]:
    """What writes samples.jsonl at the evaluations of a sharded run; all ranks call it. Rank 0 says when it is time."""
    model, world, tokenizer = setup.step.model, setup.world, data.tokenizer
    assert tokenizer is not None

    def write(step: int) -> None:
        ids = tokenizer.encode(config.records.sample_prompt)
        made = text_of_all(
            model,
            world,
            ids,
            settings_for(config),
            end_of_text=tokenizer.end_of_text,
            context=config.model.context or 1,
            precision=setup.step.precision,
            most_s=_MOST_S,
        )
        text = tokenizer.decode([*made])
        if world.is_rank0:
            keep_sample(setup.folder, records, config, step=step, text=text)

    def asked(step: int) -> None:
        world.gather(True)
        answered.append(step)
        write(step)

    sparing, answered = Sparing(asked), list[int]()

    def evaluated(step: int) -> None:
        if not can_write(model, by_all=True):
            return
        if not world.is_rank0:
            with waiting_for("whether rank 0 wants a sample"):
                wanted = world.gather(None)[0]
            if wanted:
                write(step)
            return
        sparing(step)
        if not answered:
            world.gather(False)
        answered.clear()

    return evaluated


def text_of_all(
    model: nn.Module,
    world: World,
    prompt_ids: Sequence[int],
    settings: SampleConfig,
    *,
    end_of_text: int | None,
    context: int,
    precision: Precision,
    most_s: float = math.inf,
) -> Iterator[int]:
    """As `generate`, without a cache, on all ranks: to gather the weights takes longer than to compute with them.

    most_s: when rank 0 ends it
    """
    ends_s = time.monotonic() + most_s
    window = [*(prompt_ids or [end_of_text or 0])][-context:]
    generator = torch.Generator().manual_seed(settings.seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(settings.max_tokens):
            logits = _next_logits(model, window, precision)
            chosen = choose(logits, settings, generator) if world.is_rank0 and time.monotonic() < ends_s else None
            with waiting_for("the next token of the sample"):
                token = world.gather(chosen)[0]
            own_pulse().still_there()
            if token is None or token == end_of_text:
                return
            yield token
            window = [*window, token]
            if len(window) > context:
                window = window[-max(1, context // 2) :]
    finally:
        model.train(was_training)


@torch.no_grad()
def _next_logits(model: nn.Module, ids: list[int], precision: Precision) -> Tensor:
    """float32 (V) on the CPU."""
    input_ids = torch.tensor([ids], device=precision.device)

    def last() -> Tensor:
        assert isinstance(model, GPT)
        return model.logits(model.hidden(input_ids)[:, -1])[0]

    with precision.autocast():
        logits: Tensor = inside(model, last) if isinstance(model, GPT) else model(input_ids)[0][0, -1]
    return logits.float().cpu()
