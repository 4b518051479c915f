"""A token for each text, on the device, by random numbers that are a function of seed, place and token alone.

The most likely token after adding Gumbel noise to the logits is distributed as the softmax of the logits. The noise of
a token is a hash of the text's seed, the number of tokens sampled before, and the token; so it does not matter which
other texts are in the batch, nor in which slot a text is.

Shapes: B texts, V vocabulary.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["greedy", "free", "limited"]
"""What the texts of a batch need: the most likely token, noise too, top_k and top_p too."""
WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
LEAST_TEMPERATURE = 1e-6
"""A smaller one makes no difference, but overflows."""


def choose_tokens(
    logits: Tensor, kind: Kind, *, seeds: Tensor, draws: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor
) -> Tensor:
    """float (B, V), and (B) each -> int64 (B)"""
    if kind == "greedy":
        return logits.argmax(dim=-1)
    greedy = (temperatures == 0.0)[:, None]
    scores = logits.float() / torch.where(greedy, 1.0, temperatures[:, None].clamp(min=LEAST_TEMPERATURE))
    if kind == "limited":
        scores = scores.masked_fill(scores < least_scores(scores, top_ks, top_ps)[:, None], -torch.inf)
    return torch.where(greedy, scores, scores + noise(seeds, draws, scores.size(1))).argmax(dim=-1)


def least_scores(scores: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """The smallest score that top_k and then top_p leave: (B, V), (B), (B) -> (B). Of equal ones all are left."""
    ordered = scores.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, (top_ks.clamp(max=scores.size(1)) - 1)[:, None])  # (B, 1)
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    chances = ordered.softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    stays = (before < top_ps[:, None]) | (top_ps[:, None] >= 1.0)
    stays[:, 0] = True
    return torch.maximum(torch.where(stays, ordered, torch.inf).amin(dim=-1), kth[:, 0])


def noise(seeds: Tensor, draws: Tensor, tokens: int) -> Tensor:
    """Gumbel noise of every token: int64 (B), int64 (B) -> float32 (B, V)"""
    first, second = keys(seeds, draws)
    token = torch.arange(tokens, device=seeds.device)
    hashed = mixed(mixed((token * GOLDEN + first[:, None]) & WORD) ^ second[:, None])
    uniform = ((hashed >> 9).float() + 0.5) * 2.0**-23  # neither 0 nor 1 in float32
    return -torch.log(-torch.log(uniform))


def keys(seeds: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Two words of 32 bits of each text's seed and place: int64 (B)"""
    low, high, place = seeds & WORD, (seeds >> 32) & WORD, draws & WORD
    first = mixed(low ^ mixed(high ^ mixed((place + GOLDEN) & WORD)))
    return first, mixed(first ^ SECOND)


def mixed(word: Tensor) -> Tensor:
    """A hash of 32 bits, in which each bit depends on every bit: in int64, whose lower half products keep."""
    word = ((word ^ (word >> 16)) * FIRST) & WORD
    word = ((word ^ (word >> 15)) * SECOND) & WORD
    return word ^ (word >> 16)
