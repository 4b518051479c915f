"""Text until a stop string, for many prompts at once: prompts of the same length share a cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from drumline.evals.scoring import Scorer, evaluating
from drumline.generate import SampleConfig, choose
from drumline.model import GPT, KVCache


@torch.no_grad()
def continuations(scorer: Scorer, prompts: Sequence[str], *, until: Sequence[str], settings: SampleConfig) -> list[str]:
    """What the model writes after each prompt, up to the first stop string, which is not part of it.

    At most half of the context is written; the end of a prompt that does not fit beside that is used.
    """
    most = min(settings.max_tokens, max(1, scorer.context // 2))
    encoded = [scorer.tokenizer.encode(prompt) or [scorer.tokenizer.end_of_text] for prompt in prompts]
    encoded = [ids[-max(1, scorer.context - most) :] for ids in encoded]
    alike = defaultdict(list)
    for index, ids in enumerate(encoded):
        alike[len(ids)].append(index)
    written: dict[int, str] = {}
    with evaluating(scorer.model):
        for indices in alike.values():
            for start in range(0, len(indices), scorer.batch_size):
                batch = indices[start : start + scorer.batch_size]
                texts = _together(scorer, [encoded[index] for index in batch], until, settings, most)
                written |= zip(batch, texts, strict=True)
    return [written[index] for index in range(len(prompts))]


def _together(
    scorer: Scorer, prompts: list[list[int]], until: Sequence[str], settings: SampleConfig, most: int
) -> list[str]:
    """The same for prompts of one length; settings.max_tokens is replaced by `most`"""
    model, tokenizer = scorer.model, scorer.tokenizer
    cache = KVCache(model, batch_size=len(prompts)) if isinstance(model, GPT) else None
    # Each text has its own random numbers, so that it does not depend on what else is in its batch.
    generators = [torch.Generator().manual_seed(settings.seed) for _ in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    texts: list[str | None] = [None for _ in prompts]
    unread = torch.tensor(prompts, device=scorer.device)  # (B, T)
    for _ in range(most):
        logits = _next_logits(scorer, unread, cache)
        tokens = [choose(row, settings, generator) for row, generator in zip(logits, generators, strict=True)]
        for index, token in enumerate(tokens):
            ids[index].append(token)
            if texts[index] is None:
                texts[index] = _ended(tokenizer.decode(ids[index]), until, tokenizer.decode([tokenizer.end_of_text]))
        if None not in texts:
            break
        newest = torch.tensor(tokens, device=scorer.device)[:, None]  # (B, 1)
        unread = newest if cache is not None else torch.cat([unread, newest], dim=1)
    return [tokenizer.decode(own) if text is None else text for own, text in zip(ids, texts, strict=True)]


def _next_logits(scorer: Scorer, unread: Tensor, cache: KVCache | None) -> Tensor:
    """(B, T) -> float32 (B, V) on the CPU."""
    model = scorer.model
    if isinstance(model, GPT):
        return scorer.known(model.logits(model.hidden(unread, cache=cache)[:, -1])).cpu()
    logits: Tensor = model(unread)[0]  # (B, T, V)
    return scorer.known(logits[:, -1]).cpu()


def _ended(text: str, until: Sequence[str], end_of_text: str) -> str | None:
    """The text before the first stop string; None if there is none in it yet."""
    places = [place for stop in (*until, end_of_text) if stop and (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else None
