"""How likely a model finds a text: log-likelihoods of continuations, in batches of similar length.

In float32 without autocast, so that results are the same on any device up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drumline.config import TrainConfig
from drumline.data import Tokenizer
from drumline.model import GPT

Pair = tuple[list[int], list[int]]
"""The ids of a passage, and of what follows it."""
_ROWS = 1024
"""Positions whose logits exist at the same time."""


@dataclass(frozen=True)
class Score:
    """What a model says about a continuation."""

    nats: float
    """Its log-likelihood, summed over its tokens."""
    tokens: int
    is_greedy: bool
    """Whether the model would write exactly this, taking the most likely token each time."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A model and its tokenizer; batch_size: sequences per forward."""

    model: nn.Module
    tokenizer: Tokenizer
    context: int
    batch_size: int
    vocab_size: int | None = None
    """Number of ids that a probability is shared among; None: the tokenizer's."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def encoded(self, passage: str, continuation: str) -> Pair:
        """Ids of both, as those of the whole text are divided; an empty passage is the end of another document."""
        text = passage.rstrip()  # a space belongs to the word after it, as in most tokenizers
        before = self.tokenizer.encode(text)
        after = self.tokenizer.encode(passage + continuation)[len(before) :]
        return before or [self.tokenizer.end_of_text], after

    @torch.no_grad()
    def scores(self, pairs: Sequence[Pair], *, each_batch: Callable[[], None] = lambda: None) -> list[Score]:
        """One for each pair; of a pair that exceeds the context, its end."""
        order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]) - len(pairs[index][1]))
        scored: dict[int, Score] = {}
        with evaluating(self.model):
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                scored |= zip(batch, self._scores([pairs[index] for index in batch]), strict=True)
                each_batch()
        return [scored[index] for index in range(len(pairs))]

    @property
    def vocabulary(self) -> int:
        """Ids that a probability is shared among: without those that only round up the model's, as an export does."""
        return self.vocab_size or self.tokenizer.vocab_size

    def known(self, logits: Tensor) -> Tensor:
        """Those of the vocabulary: float32 (..., V)."""
        return logits[..., : self.vocabulary].float()

    def batches(self, pairs: int) -> int:
        return -(-pairs // self.batch_size)

    def _scores(self, pairs: Sequence[Pair]) -> list[Score]:
        rows = [(before + after)[-(self.context + 1) :] for before, after in pairs]
        inputs = torch.zeros(len(rows), max(1, *(len(row) - 1 for row in rows)), dtype=torch.int64)  # (B, T)
        places: list[tuple[int, int]] = []  # of each target: its row, and the position before it
        targets: list[int] = []
        spans: list[slice] = []
        for index, (row, (_, after)) in enumerate(zip(rows, pairs, strict=True)):
            inputs[index, : len(row) - 1] = torch.tensor(row[:-1])  # the padding comes after, so nothing attends to it
            first = max(1, len(row) - len(after))
            spans.append(slice(len(targets), len(targets) + len(row) - first))
            places += [(index, at - 1) for at in range(first, len(row))]
            targets += row[first:]
        if not targets:
            return [Score(0.0, 0, True) for _ in rows]
        nats, greedy = self._predicted(inputs, torch.tensor(places), torch.tensor(targets))
        return [Score(float(nats[span].sum()), span.stop - span.start, bool(greedy[span].all())) for span in spans]

    def _predicted(self, inputs: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target, float64 (N,), and whether it is the most likely token, bool (N,); on the CPU.

        inputs: int64 (B, T); places: int64 (N, 2), row and position before the target; targets: int64 (N,)
        """
        model, inputs = self.model, inputs.to(self.device)
        rows, columns = places.to(self.device).unbind(1)
        hidden = model.hidden(inputs) if isinstance(model, GPT) else model(inputs)[0]  # (B, T, D) or (B, T, V)
        nats, greedy = [], []
        for start in range(0, len(targets), _ROWS):
            part = slice(start, start + _ROWS)
            chosen, wanted = hidden[rows[part], columns[part]], targets[part].to(self.device)
            logits = self.known(model.logits(chosen) if isinstance(model, GPT) else chosen)  # (n, V)
            nats.append(logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0].cpu().double())
            greedy.append((logits.argmax(dim=-1) == wanted).cpu())
        return torch.cat(nats), torch.cat(greedy)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; the mode comes back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def scorer_of(model: nn.Module, tokenizer: Tokenizer, config: TrainConfig, *, batch_size: int) -> Scorer:
    """For the model of a run."""
    context = model.config.max_position_embeddings if isinstance(model, GPT) else config.model.context
    assert context is not None
    rows = config.data.vocab_size if config.model.init_from else None  # of a model from elsewhere, all of them count
    return Scorer(model=model, tokenizer=tokenizer, context=context, batch_size=batch_size, vocab_size=rows)
