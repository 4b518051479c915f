"""The limits of sampling: which tokens top_k and top_p leave, and sampling parameters that are out of range."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from drumline.errors import ConfigError

if TYPE_CHECKING:
    from drumline.generate.sample import SampleConfig


def most_likely(scores: Tensor, settings: SampleConfig) -> tuple[Tensor, Tensor]:
    """What top_k and top_p leave of scores (V), and its ids; what is excluded after that has a score of -inf."""
    scores, ids = scores.topk(min(settings.top_k or len(scores), len(scores)))  # most likely first
    if settings.top_p is not None:
        probabilities = scores.softmax(dim=0)
        before = probabilities.cumsum(dim=0) - probabilities
        # The most likely token always stays, however small top_p is.
        scores = scores.masked_fill(before >= settings.top_p, -torch.inf)
    return scores, ids


def refuse(settings: SampleConfig) -> NoReturn:
    """Name the first one of them, and a value that works."""
    if not 0.0 <= settings.temperature < float("inf"):
        raise ConfigError(
            f"temperature {settings.temperature} is not a number of 0 or more",
            fix="use --temperature 0 for greedy decoding, about 0.8 for more varied text",
        )
    if settings.top_k is not None and settings.top_k < 1:
        raise ConfigError(f"top_k {settings.top_k} leaves no tokens to sample from", fix="use --top_k 1 or more")
    if settings.top_p is not None and not 0.0 < settings.top_p <= 1.0:
        raise ConfigError(f"top_p {settings.top_p} is not a probability above 0", fix="use --top_p 0.9, or up to 1")
    raise ConfigError(f"max_tokens {settings.max_tokens} generates no text", fix="use --max_tokens 1 or more")
