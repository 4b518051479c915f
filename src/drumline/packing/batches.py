"""The windows of a step, which may have padding: the loss is the mean over those tokens of the step that count."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from drumline.data import BatchPlan, TokenBatches, TokenFile
from drumline.packing.tokens import PackedTokens


class PackedBatches(TokenBatches):
    """Windows of whole documents.

    A step's loss is divided by the number of tokens in its windows, a constant. So a micro-batch has one more element:
    that number divided by how many tokens of the step count, which is the same for every micro-batch on every rank.
    """

    def __init__(
        self, tokens: TokenFile, plan: BatchPlan, *, context: int, seed: int, document_mask: bool = False
    ) -> None:
        assert isinstance(tokens, PackedTokens)
        super().__init__(tokens, plan, context=context, seed=seed, document_mask=document_mask)
        self._packed = tokens
        # The index counts, not how many windows it has: --allow_change packing then allows all of the change.
        self.facts = {"items_per_epoch": self.items, "packing": tokens.index.about.sha256}
        self.items = tokens.windows(context)
        self._scale_of = (-1, 0.0)

    def micro_batch(self, step: int, index: int) -> tuple[Any, ...]:
        """As of TokenBatches, and what to multiply the summed loss by, float32 ()"""
        return (*super().micro_batch(step, index), torch.tensor(self._scale(step), dtype=torch.float32))

    def _scale(self, step: int) -> float:
        known, scale = self._scale_of
        if known != step:
            counted = self._packed.counted(self.windows(step), context=self._context)
            scale = self.plan.sequences * self.tokens_per_item / max(1, counted)
            self._scale_of = (step, scale)
        return scale

    def names(self, step: int, index: int | None = None) -> list[str]:
        tokens = self._packed
        starts = [start for window in self.windows(step, index) for start, _ in tokens.index.segments(window)]
        if tokens.document_ends is None or tokens.names_path is None:
            return []
        # uint64 needles: with Python ints, numpy would convert the whole map to float64.
        numbers = np.searchsorted(tokens.document_ends, np.array(starts, dtype=np.uint64), side="right").tolist()
        wanted, names = dict.fromkeys(numbers, ""), tokens.names_path
        with open(names, encoding="utf-8", newline="\n") as lines:
            for number, line in zip(range(max(numbers) + 1), lines, strict=False):
                if number in wanted:
                    wanted[number] = line.rstrip("\n")
        return list(dict.fromkeys(wanted.values()))


make_batches = PackedBatches
