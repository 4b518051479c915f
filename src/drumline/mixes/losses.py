"""The training loss of each source, from the losses of rows that the model's loss computes anyway.

Each micro-batch has a sum and a number of tokens per source. They travel with the loss of the step, each in a slot of
its own, so that they cost no message, and are added in the order of micro-batches: the same bits on any ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.mixes.batches import MixBatches
from drumline.mixes.opening import Mix
from drumline.model import IGNORED, WATCHERS, token_objective
from drumline.parallel import Strategy
from drumline.report import Records
from drumline.train import Gradient, Setup, Step, StepResult
from drumline.units import count

_MANY_EPOCHS = 4
"""From so many passes over the same tokens on, they are worth little: Muennighoff et al., 2023."""


def follow(mix: Mix, setup: Setup, records: Records, *, total_steps: int) -> None:
    """Say what the run has of each source, and let its steps have the loss of each."""
    batches = setup.batches
    assert isinstance(batches, MixBatches)
    lines = introduction(batches, total_steps=total_steps)
    if lines:
        records.say("\n".join(lines))
    shown = {f"valid_loss/{name}": partial("{0} {1:.4f}".format, name) for name in mix.valid}
    at = list(records.formats).index("perplexity")
    items = list(records.formats.items())
    records.formats = dict([*items[:at], *shown.items(), *items[at:]])
    batches.with_sources = True
    watched = _Watched(len(mix.sources))
    setup.step.backward.objective = watched
    setup.step.strategy = _WithSources(setup, watched)
    step = setup.step
    setup.step = _MixStep(
        step.model, step.optimizer, step.strategy, step.backward, step.precision, step.grad_clip
    ).naming(mix.names, records.say)


def introduction(batches: MixBatches, *, total_steps: int) -> list[str]:
    """A line per source: its part of the run, in tokens and epochs; and a warning of one that is repeated often."""
    seen = batches.schedule.seen(total_steps * batches.plan.sequences)
    whole, width = max(1, sum(seen)), max(map(len, batches.source_names))
    lines, often = [], []
    for name, tokens, own, windows in zip(batches.source_names, batches.tokens, seen, batches.windows_of, strict=True):
        epochs = own / windows
        lines.append(
            f"       {name:<{width}}  {own / whole:>6.1%} of the run: {count(own * batches.tokens_per_item)} tokens, "
            f"{epochs:.2f} epochs of {count(len(tokens))}"
        )
        if epochs > _MANY_EPOCHS:
            often.append(f"{name} {epochs:.1f} times")
    if lines:
        lines[0] = "mix" + lines[0][3:]
    if often:
        lines.append(f"warning: repeated often: {', '.join(often)}; give it less weight, or more text")
    return lines


class _Watched:
    """The objective of a batch whose sequences have sources: catches the losses of its rows."""

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self.newest: Tensor | None = None
        """float32 (2, sources): summed losses and numbers of tokens of the last micro-batch; None: not known"""

    def __call__(self, model: nn.Module, batch: tuple[Any, ...]) -> Tensor:
        *plain, sources = batch
        parts: list[Tensor] = []
        WATCHERS.append(parts.extend)
        try:
            loss = token_objective(model, tuple(plain))
        finally:
            WATCHERS.pop()
        self.newest = self._summed(parts, plain[1], sources)
        return loss

    def _summed(self, parts: list[Tensor], targets: Tensor, sources: Tensor) -> Tensor | None:
        """parts: losses of rows (n,), None caught in a custom model. targets: (B, T). sources: (B,)"""
        if sum(map(len, parts)) != targets.numel():
            return None
        losses = torch.cat(parts).view(targets.shape).sum(1)  # (B,)
        counts = (targets != IGNORED).sum(1).float()
        # A mask and a sum, where an index_add would add in any order on a GPU.
        is_of = torch.arange(self.sources, device=sources.device)[:, None] == sources  # (S, B)
        return torch.stack([(is_of * losses).sum(1), (is_of * counts).sum(1)])


class _WithSources:
    """A strategy that sends the sums of sources along with the loss."""

    def __init__(self, setup: Setup, watched: _Watched) -> None:
        self._inner: Strategy = setup.step.strategy
        self.model, self.scale = self._inner.model, self._inner.scale
        self._watched, plan = watched, setup.batches.plan
        self._share, self.micro_batches = plan.share(setup.world.rank, setup.world.size), plan.micro_batches
        self._sums: list[Tensor | None] = []

    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        if number == 0:
            self._sums = []
        return self._inner.micro_batch(number)

    def add(self, loss: Tensor) -> None:
        self._inner.add(loss)
        newest = self._watched.newest
        # A replayed CUDA graph writes to the same tensor again.
        self._sums.append(None if newest is None else newest.clone())

    def finish(self, extras: Tensor) -> Tensor:
        slots = extras.new_zeros((self.micro_batches, 2, self._watched.sources))
        for index, sums in zip(self._share, self._sums, strict=True):
            if sums is not None:
                slots[index] = sums
        return self._inner.finish(torch.cat((extras, slots.flatten())))

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return self._inner.norm(gradients)


class _MixStep(Step):
    """A step whose result has the loss of each source."""

    def naming(self, names: list[str], say: Callable[[str], None]) -> _MixStep:
        self._names, self._say, self._is_said = names, say, False
        return self

    def update(self, gradient: Gradient, *, lr: float | None) -> Callable[[], StepResult]:
        read = super().update(gradient, lr=lr)
        return lambda: self._split(read())

    def _split(self, result: StepResult) -> StepResult:
        """Times of ranks come first, then the slots: micro-batch by micro-batch, sums and numbers of tokens."""
        assert isinstance(self.strategy, _WithSources)
        sources = len(self._names)
        size = self.strategy.micro_batches * 2 * sources
        times, slots = result.work_s[:-size], result.work_s[-size:]
        rows = [slots[at : at + 2 * sources] for at in range(0, size, 2 * sources)]
        sums = [sum(column) for column in zip(*rows, strict=True)]
        losses = {name: (sums[at], sums[sources + at]) for at, name in enumerate(self._names)}
        if not any(sums[sources:]) and not self._is_said:
            self._is_said = True
            self._say("the loss of each source is not known: the model does not tell the losses of its tokens")
        more = tuple((f"loss/{name}", loss / tokens) for name, (loss, tokens) in losses.items() if tokens)
        return replace(result, work_s=times, more=more)
