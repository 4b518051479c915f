"""The documents of a step, and which of them raised its loss or made its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from drumline.checkpoint import Checkpoint, open_checkpoint
from drumline.data import Data, TokenBatches, TokenFile, plan_batches
from drumline.errors import ConfigError
from drumline.mixes import MixBatches
from drumline.model import GPT, IGNORED, token_objective
from drumline.packing import PackedBatches
from drumline.reasons.again import computed_again
from drumline.reasons.documents import Part, parts_of, parts_of_mix, targets_of
from drumline.reasons.probing import at_step
from drumline.reasons.runs import PureRun, check_step
from drumline.reasons.skipping import Skipped, refuse_chats, without_skipped
from drumline.train import Setup, to_device


@dataclass(frozen=True)
class Blamed:
    """A part of a document, and what it did to the step."""

    part: Part
    targets: int
    loss: float
    """Mean over its tokens, in the context that they had."""
    loss_without: float
    """What the loss of the step would be without it."""
    grad_norm: float
    """Of its part of the step's gradient."""


@dataclass(frozen=True)
class StepLoss:
    loss: float
    parts: list[Blamed]
    """Those that raised the loss the most first."""


def batches_of(run: PureRun) -> tuple[Data, TokenBatches]:
    """The data of a run, and its batches; no model is made."""
    data, config = run.data(), run.config
    refuse_chats(data.train)
    make: Callable[..., TokenBatches] = PackedBatches if config.data.packing == "best_fit" else TokenBatches
    make = without_skipped(config.data.skip_list) if config.data.skip_list else make
    plan = plan_batches(config.batch, default_batch_size=1, world_size=1)
    if data.mix is not None:
        make = partial(data.mix.batches, total_steps=run.total_steps)
    return data, make(data.train, plan, context=config.model.context or 0, seed=config.run.seed)


def blame(run: PureRun, tokens: TokenFile, batches: TokenBatches, *, step: int) -> list[Part]:
    """The parts of documents in step `step`, counted from 1, in the order of its sequences."""
    check_step(run, step)
    windows = batches.windows(run.data_step(step - 1))
    if isinstance(batches, MixBatches):
        return parts_of_mix(batches, windows)
    return parts_of(tokens, windows, context=batches.tokens_per_item)


@contextmanager
def before_step(run: PureRun, *, step: int, from_start: bool) -> Iterator[Checkpoint | None]:
    """A checkpoint of the step before step `step`, computed if there is none; None: the initial weights."""
    start = run.start(step, from_start=from_start)
    begun = start.step if start else 0
    if begun == step - 1:
        yield start
        return
    with computed_again(run, start, until=step - 1) as folder:
        yield open_checkpoint(folder.checkpoint(step - 1))


def recomputed(
    run: PureRun, tokens: TokenFile, parts: Sequence[Part], *, step: int, from_start: bool = False
) -> StepLoss:
    """Loss and gradient norm of each part of a document in a step, by a backward of its own.

    Without dropout: its draws are for whole micro-batches.
    """
    with before_step(run, step=step, from_start=from_start) as start, at_step(run, start) as setup:
        model = setup.step.model.eval()
        if isinstance(model, GPT):
            model.vocabulary = None  # the loss is that of training, which counts every row
        rows = list(_rows(setup, tokens, run.data_step(step - 1)))
        found = [(part, *_measured(setup, rows, part)) for part in dict.fromkeys(parts)]
    total = sum(loss for _, _, loss, _ in found)
    targets = sum(count for _, count, _, _ in found)
    blamed = [
        Blamed(part, count, loss / count, (total - loss) / max(1, targets - count), norm)
        for part, count, loss, norm in found
        if count
    ]
    return StepLoss(total / max(1, targets), sorted(blamed, key=lambda each: each.loss_without))


@dataclass(frozen=True)
class _Row:
    """A sequence of the step."""

    window: int
    places: Tensor
    """The token of the file that each target is: int64 (T,)"""
    batch: list[Tensor | None]
    """inputs, targets, documents, each (1, T)"""
    scale: float
    """What the summed loss is multiplied by"""


def _rows(setup: Setup, tokens: TokenFile, data_step: int) -> Iterator[_Row]:
    batches = setup.batches
    assert isinstance(batches, TokenBatches)
    for index in range(batches.plan.micro_batches):
        *batch, scale = (*batches.micro_batch(data_step, index), 1.0)[:4]
        length = batch[0].shape[1]
        windows = batches.windows(data_step, index)
        of_source = batches.located if isinstance(batches, MixBatches) else lambda window: (0, window)
        places = [targets_of(tokens, of_source(each)[1], context=batches.tokens_per_item) for each in windows]
        rows = torch.from_numpy(np.stack(places)).reshape(-1, length)
        for row, own in enumerate(rows):
            window = windows[row * length // batches.tokens_per_item]
            here = [None if each is None else each[row : row + 1] for each in batch]
            yield _Row(window, own, here, float(scale))


def _measured(setup: Setup, rows: Sequence[_Row], part: Part) -> tuple[int, float, float]:
    """Number of targets, summed loss, and norm of its gradient in the step's mean loss."""
    model, precision = setup.step.model, setup.step.precision
    setup.step.optimizer.zero_grad(set_to_none=True)
    count, summed = 0, 0.0
    for row in rows:
        if row.window != part.window:
            continue
        inputs, targets, documents = row.batch
        assert targets is not None
        own = torch.where((row.places >= part.first) & (row.places < part.last), targets, IGNORED)
        here = int((own != IGNORED).sum())
        if here == 0:
            continue
        with precision.autocast():
            loss = token_objective(model, to_device((inputs, own, documents), precision.device))
        (loss * row.scale / setup.step.backward.weight).backward()  # type: ignore[no-untyped-call]
        count, summed = count + here, summed + loss.item()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0
    return count, summed, norm


def chosen(parts: Sequence[Part], wanted: Sequence[str]) -> list[Skipped]:
    """The documents of some parts, by their numbers in a list, from 1, or by name."""
    documents = []
    for each in wanted:
        if each.isdecimal() and 1 <= int(each) <= len(parts):
            found = [parts[int(each) - 1]]
        else:
            found = [part for part in parts if part.document == each]
        if not found:
            raise ConfigError(
                f"this step has no document {each!r}",
                fix=f"give --exclude a number from 1 to {len(parts)}, or the name of a document of the step",
            )
        documents += [Skipped(part.start, part.stop, part.document) for part in found]
    return documents
