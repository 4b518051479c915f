"""The sequences of a step, from all sources of a mix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumline.config import MixSource, MixStage
from drumline.data import BatchPlan, TokenBatches, document_names, mix, window_batch
from drumline.errors import ConfigError
from drumline.mixes.opening import Mix
from drumline.mixes.schedule import BLOCK, Schedule, normalized, stretches_of


class MixBatches(TokenBatches):
    """Windows of several token files, chosen by a `Schedule`. A window's number counts those of all sources in order.

    items: sequences that the amounts ask for, if all sources have one; else windows of all sources
    """

    with_sources = False
    """Whether a micro-batch has one more element: the source of each sequence, int64 (B,)."""

    def __init__(
        self, mixed: Mix, plan: BatchPlan, *, context: int, seed: int, total_steps: int, document_mask: bool = False
    ) -> None:
        names = mixed.names
        if len(names) > BLOCK:
            raise ConfigError(
                f"a mix of {len(names):,} sources: more than {BLOCK:,}", fix="prepare some of them together"
            )
        self.plan, self.tokens_per_item, self._context, self.total_steps = plan, context, context, total_steps
        self.source_names, self.tokens = names, [each.train for each in mixed.sources]
        self._streams = [
            TokenBatches(each, plan, context=context, seed=mix(seed, number), document_mask=document_mask)
            for number, each in enumerate(self.tokens)
        ]
        self.windows_of = [stream.items for stream in self._streams]
        self._first = np.cumsum([0, *self.windows_of])
        self._masked = document_mask
        abouts = [each.about for each in mixed.sources]
        wanted = sequences_of(abouts, self.windows_of, context=context)
        asked = math.ceil(sum(each or 0 for each in wanted))
        self.items = asked if all(each is not None for each in wanted) else int(self._first[-1])
        self.schedule = schedule_of(
            abouts,
            mixed.stages,
            self.windows_of,
            context=context,
            sequences=plan.sequences,
            total_steps=total_steps,
            seed=seed,
        )
        self.facts = {
            "train_data_path": _shown(names, self.schedule.shares),
            "stages": [
                f"{start // plan.sequences}-{'' if stop is None else stop // plan.sequences} {_shown(names, shares)}"
                for start, stop, shares in self.schedule.stages
            ],
        }

    def located(self, window: int) -> tuple[int, int]:
        """The source of a window, and its number there."""
        source = int(np.searchsorted(self._first, window, side="right")) - 1
        return source, window - int(self._first[source])

    def windows(self, step: int, index: int | None = None) -> list[int]:
        sources, windows = self._chosen(step, index)
        found: list[int] = (windows + self._first[sources]).tolist()
        return found

    def _chosen(self, step: int, index: int | None) -> tuple[Any, Any]:
        """The source of each sequence, and its window there: int64 (B,), int64 (B,)."""
        plan = self.plan
        start = step * plan.sequences + (index or 0) * plan.micro_batch_size
        count = plan.sequences if index is None else plan.micro_batch_size
        sources, numbers = self.schedule.at(np.arange(start, start + count, dtype=np.int64))
        windows = np.empty_like(numbers)
        for source in np.unique(sources).tolist():
            of_it = sources == source
            windows[of_it] = self._streams[source].visited(numbers[of_it])
        return sources, windows

    def micro_batch(self, step: int, index: int) -> tuple[Any, ...]:
        sources, windows = self._chosen(step, index)
        parts: list[Tensor | None] = [None, None, None]
        for source in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == source)
            own = self._batch_of(source, windows[rows].tolist())
            for place, part in enumerate(own):
                if part is not None:
                    whole = parts[place]
                    if whole is None:
                        whole = parts[place] = torch.zeros((len(sources), *part.shape[1:]), dtype=part.dtype)
                    whole[torch.from_numpy(rows)] = part
        context = self.context_of(step)
        batch = tuple(None if part is None else part.reshape(-1, context) for part in parts)
        each = torch.from_numpy(sources).repeat_interleave(self._context // context)
        return (*batch, each) if self.with_sources else batch

    def _batch_of(self, source: int, windows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Windows of one source as (inputs, targets, document ids), each (n, context)."""
        tokens = self.tokens[source]
        end_of_text = tokens.end_of_text if self._masked else None
        return window_batch(tokens, windows, context=self._context, end_of_text=end_of_text)

    def names(self, step: int, index: int | None = None) -> list[str]:
        names: dict[str, None] = {}
        for source, window in map(self.located, self.windows(step, index)):
            documents = document_names(self.tokens[source], window * self._context, (window + 1) * self._context)
            names |= dict.fromkeys(f"{self.source_names[source]}: {each}" for each in documents)
        return list(names)


def schedule_of(
    sources: Sequence[MixSource],
    stages: Sequence[MixStage],
    windows: Sequence[int],
    *,
    context: int,
    sequences: int,
    total_steps: int,
    seed: int,
) -> Schedule:
    """The sources of every position of a run. windows: of each source. sequences: of a step"""
    wanted = sequences_of(sources, windows, context=context)
    shares = shares_of(sources, wanted, positions=total_steps * sequences)
    names = [each.name for each in sources]
    placed = stretches_of(stages, names, sequences=sequences, total_steps=total_steps)
    return Schedule(shares, placed, seed=seed)


def sequences_of(sources: Sequence[MixSource], windows: Sequence[int], *, context: int) -> list[Fraction | None]:
    """Sequences that each source's amount asks for; None for one with a weight."""
    of_kind = {"epochs": lambda amount, own: amount * own, "tokens": lambda amount, own: amount / context}
    return [
        of_kind[each.kind](each.amount, own) if each.kind in of_kind else None
        for each, own in zip(sources, windows, strict=True)
    ]


def shares_of(
    sources: Sequence[MixSource], wanted: Sequence[Fraction | None], *, positions: int
) -> tuple[Fraction, ...]:
    """The share of each source in a run of so many sequences: weights share what amounts leave of it."""
    names = [each.name for each in sources]
    asked = sum((each for each in wanted if each is not None), Fraction(0))
    weights = sum((each.amount for each in sources if each.kind == "weight"), Fraction(0))
    left = positions - asked if asked else weights
    if weights and positions and left <= 0:
        raise ConfigError(
            f"epochs and tokens of the mix are {float(asked):,.0f} sequences, and the whole run has {positions:,}: "
            "nothing is left for sources with a weight",
            fix="train longer (--total_steps), lower the amounts, or give all sources amounts",
        )
    each_weight = (left if positions else 1) / weights if weights else Fraction(0)  # 0 positions: not known yet
    shares = [each.amount * each_weight if own is None else own for each, own in zip(sources, wanted, strict=True)]
    return normalized(shares, names)


def _shown(names: Sequence[str], shares: Sequence[Fraction]) -> str:
    return ",".join(f"{name}:{float(share):.9g}" for name, share in zip(names, shares, strict=True) if share)
