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
from drumline.generate.samples import keep_sample, settings_for, uncompiled
from drumline.model import GPT
from drumline.parallel import World, own_pulse, waiting_for
from drumline.report import Records, Sparing
from drumline.sharding import inside
from drumline.signals import counting
from drumline.train import Precision, Setup

_MOST_S, _LAST_MOST_S = 2.0, 10.0
"""A sample ends after that, at evaluations and at the end: where weights are gathered slowly, each token takes long."""


def write_together(config: TrainConfig, data: Data, setup: Setup, records: Records) -> None:
    """Let all ranks of a sharded run write samples.jsonl at its evaluations, and the text at its end."""

    def write(step: int) -> None:
        text = _text(config, data, setup, settings_for(config), most_s=_MOST_S)
        if setup.world.is_rank0:
            keep_sample(setup.folder, records, config, step=step, text=text)

    def last_text() -> str | None:
        if not can_write(setup.step.model, by_all=True):
            return None
        with counting() as stops:  # an exception here would leave the other ranks waiting for this one
            settings = settings_for(config, is_last=True)
            return _text(config, data, setup, settings, most_s=_LAST_MOST_S, stops=lambda: bool(stops))

    setup.evaluated, setup.last_text = _sparing(write, setup), last_text


def _sparing(write: Callable[[int], None], setup: Setup) -> Callable[[int], None]:
    """As `Sparing`, on all ranks: rank 0 says when it is time."""
    model, world = setup.step.model, setup.world

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


def _text(
    config: TrainConfig,
    data: Data,
    setup: Setup,
    settings: SampleConfig,
    *,
    most_s: float,
    stops: Callable[[], bool] = lambda: False,
) -> str:
    tokenizer = data.tokenizer
    assert tokenizer is not None
    made = text_of_all(
        setup.step.model,
        setup.world,
        tokenizer.encode(config.records.sample_prompt),
        settings,
        end_of_text=tokenizer.end_of_text,
        context=config.model.context or 1,
        vocabulary=tokenizer.vocab_size,
        precision=setup.step.precision,
        most_s=most_s,
        stops=stops,
    )
    return tokenizer.decode([*made])


def text_of_all(
    model: nn.Module,
    world: World,
    prompt_ids: Sequence[int],
    settings: SampleConfig,
    *,
    end_of_text: int | None,
    context: int,
    precision: Precision,
    vocabulary: int | None = None,
    most_s: float = math.inf,
    stops: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """As `generate`, without a cache, on all ranks: to gather the weights takes longer than to compute with them.

    most_s: when rank 0 ends it. stops: whether this rank was asked to stop; if one was, KeyboardInterrupt on all
    """
    ends_s = time.monotonic() + most_s
    window = [*(prompt_ids or [end_of_text or 0])][-context:]
    generator = torch.Generator().manual_seed(settings.seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(settings.max_tokens):
            logits = _next_logits(model, window, precision)[:vocabulary]
            chosen = choose(logits, settings, generator) if world.is_rank0 and time.monotonic() < ends_s else None
            with waiting_for("the next token of the sample"):
                said = world.gather([chosen, stops()])
            own_pulse().still_there()
            if any(stopped for _, stopped in said):
                raise KeyboardInterrupt
            token = said[0][0]
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

    with uncompiled(), precision.autocast():
        logits: Tensor = inside(model, last) if isinstance(model, GPT) else model(input_ids)[0][0, -1]
    return logits.float().cpu()
