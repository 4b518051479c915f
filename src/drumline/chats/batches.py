"""The conversations of a step, with the loss as the mean over the assistant's tokens of the whole step."""

from __future__ import annotations

import torch
from torch import Tensor

from drumline.chats.packing import ChatTokens, packed_batch
from drumline.data import BatchPlan, TokenBatches, TokenFile, document_names
from drumline.errors import DataError


class ChatBatches(TokenBatches):
    """Windows of whole conversations.

    A step's loss is divided by the number of tokens in its windows, a constant. So a micro-batch has one more element:
    that number divided by how many tokens of the step count, which is the same for every micro-batch on every rank.
    """

    def __init__(
        self, tokens: TokenFile, plan: BatchPlan, *, context: int, seed: int, document_mask: bool = False
    ) -> None:
        """document_mask: always, whatever is given"""
        assert isinstance(tokens, ChatTokens)
        self.plan, self.tokens_per_item = plan, context
        self._chats, self._context, self._seed = tokens, context, seed
        self.items = tokens.windows(context)
        if self.items < 1 or not any(tokens.counted([window], context=context) for window in range(self.items)):
            raise DataError(
                f"{tokens.path} has no tokens of the assistant to train on", fix="use conversations with answers"
            )
        self._scale_of = (-1, 0.0)
        # The same tokens with other answers in them are other data.
        self.facts = {"train_data": f"{tokens.sha256}, targets {tokens.targets_sha256}"}

    @property
    def short_steps(self) -> int:
        """Never: the first steps, too, have whole conversations."""
        return 0

    @short_steps.setter
    def short_steps(self, steps: int) -> None:
        """Not followed."""

    def micro_batch(self, step: int, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """inputs, targets and document ids, each int64 (B, T), and what to multiply the summed loss by, float32 ()"""
        batch = packed_batch(self._chats, self.windows(step, index), context=self._context)
        return (*batch, torch.tensor(self._scale(step), dtype=torch.float32))

    def _scale(self, step: int) -> float:
        known, scale = self._scale_of
        if known != step:
            counted = self._chats.counted(self.windows(step), context=self._context)
            scale = self.plan.sequences * self.tokens_per_item / max(1, counted)
            self._scale_of = (step, scale)
        return scale

    def names(self, step: int, index: int | None = None) -> list[str]:
        packed = self._chats.packed(self._context)
        parts = [part for window in self.windows(step, index) for part in packed[window]]
        return list(
            dict.fromkeys(name for part in parts for name in document_names(self._chats, part.start, part.stop))
        )


make_batches = ChatBatches
