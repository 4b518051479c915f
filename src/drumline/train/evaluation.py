"""Validation loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from drumline.data import TokenFile, window_batch
from drumline.errors import DataError
from drumline.parallel import World, waiting_for
from drumline.train.step import Objective, Precision, to_device


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean cross entropy per token, in nats."""
    tokens: int
    """Number of predicted tokens."""
    bits_per_byte: float | None
    """Bits per byte of text, independent of the tokenizer; None if the size of the text is unknown."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    tokens: TokenFile,
    *,
    context: int,
    batch_size: int,
    precision: Precision,
    world: World,
    windows: int | None = None,
    document_mask: bool = False,
    each_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """The loss over a token file: all of it, or `windows` evenly spaced sequences; ranks share the work."""
    total = tokens.windows(context)
    if total < 1:
        raise DataError(f"{tokens.path} has {len(tokens)} tokens, too few to predict one", fix="use more text")
    count = total if windows is None else min(windows, total)
    chosen = [number * total // count for number in range(count)]
    # Each rank takes a contiguous part, which may be empty.
    bounds = [len(chosen) * rank // world.size for rank in (world.rank, world.rank + 1)]
    most, chosen = -(-count // world.size), chosen[bounds[0] : bounds[1]]
    was_training = model.training
    model.eval()
    nats, counted, end_of_text = 0.0, 0, tokens.end_of_text if document_mask else None
    for start in range(0, most, batch_size):  # as many on each rank: a forward of a sharded model takes all of them
        part = chosen[start : start + batch_size] or [0]
        batch = window_batch(tokens, part, context=context, end_of_text=end_of_text)
        with precision.autocast():
            summed = objective(model, to_device(batch, precision.device)).item()
        if start < len(chosen):
            nats, counted = nats + summed, counted + int((batch[1] != -100).sum())
        each_batch()
    model.train(was_training)
    dtype = torch.float64 if precision.device.type != "mps" else torch.float32
    own = torch.tensor([nats, counted], dtype=dtype, device=precision.device)
    with waiting_for("the sum of the validation losses"):
        nats, counted = world.sum(own).tolist()
    loss = nats / counted
    bits = loss / math.log(2) * len(tokens) / tokens.text_bytes if tokens.text_bytes else None
    return Evaluation(loss=loss, tokens=round(counted), bits_per_byte=bits)
