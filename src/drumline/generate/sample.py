"""Text from a model: token by token, each sampled from the model's prediction.

Knows how a token is sampled, and what happens when a text exceeds the model's context.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drumline.model import GPT, KVCache

VISIBLE = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""For str.translate: control characters, which a terminal would obey, are shown; newlines and tabs stay."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """Sampling parameters."""

    temperature: float = 0.8
    """Sampling temperature; 0: greedy."""
    top_k: int | None = None
    """Sample from the k most likely tokens."""
    top_p: float | None = None
    """Nucleus sampling: sample from the most likely tokens that together reach this probability, after top_k."""
    seed: int = 0
    """The same seed and prompt give the same text."""
    max_tokens: int = 200
    """Stop after this many tokens, unless the model ends the text earlier."""

    def __post_init__(self) -> None:
        top_k, top_p = 1 if self.top_k is None else self.top_k, 1.0 if self.top_p is None else self.top_p
        if not 0.0 <= self.temperature < float("inf") or min(top_k, self.max_tokens) < 1 or not 0.0 < top_p <= 1.0:
            from drumline.generate.limits import refuse

            refuse(self)


def can_write(model: nn.Module, *, by_all: bool = False) -> bool:
    """Whether a model returns logits without targets: drumline's own, or one whose forward signature says so.

    Sharded, only if all ranks compute each token.
    """
    known = inspect.signature(model.forward).parameters.get("targets")
    says_so = isinstance(model, GPT) or getattr(known, "default", 0) is None
    return says_so and (by_all or not hasattr(model, "unshard"))


def generate(
    model: nn.Module,
    prompt_ids: list[int],
    settings: SampleConfig,
    *,
    end_of_text: int | None,
    context: int | None = None,
    use_cache: bool = True,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield the generated ids one by one, until `end_of_text` (not yielded) or `max_tokens`.

    An empty prompt starts from end_of_text, or from id 0. A prompt that exceeds the context keeps its end; a text that
    does continues from its last half context, so that the cache is refilled once per half context. Without a cache,
    which only a GPT has, every token is computed from the whole window again: the same text, but slower.

    vocabulary: tokens that may be sampled, the first ones; default: all that the model has rows for
    """
    if isinstance(model, GPT):
        context = model.config.max_position_embeddings
    assert context is not None
    window = unread = (prompt_ids or [end_of_text or 0])[-context:]
    cache = KVCache(model) if use_cache and isinstance(model, GPT) else None
    generator = torch.Generator().manual_seed(settings.seed)
    was_training = model.training
    model.eval()
    try:
        for _ in range(settings.max_tokens):
            logits = next_logits(model, unread, cache)[:vocabulary]
            if (token := choose(logits, settings, generator)) == end_of_text:
                return
            yield token
            window = [*window, token]
            unread = window if cache is None else [token]
            if len(window) > context:
                window = unread = window[-max(1, context // 2) :]
                if cache is not None:
                    cache.clear()
    finally:
        model.train(was_training)


@torch.inference_mode()
def next_logits(model: nn.Module, ids: list[int], cache: KVCache | None) -> Tensor:
    """Logits for the next token after `ids` and what the cache holds: float32 (V) on the CPU."""
    input_ids = torch.tensor([ids], device=next(model.parameters()).device)
    if not isinstance(model, GPT):
        logits: Tensor = model(input_ids)[0]  # (1, T, V)
        return logits[0, -1].float().cpu()
    hidden = model.hidden(input_ids, cache=cache)  # (1, T, D)
    return model.logits(hidden[:, -1])[0].float().cpu()


def choose(logits: Tensor, settings: SampleConfig, generator: torch.Generator) -> int:
    """Sample one id from logits (V)."""
    if settings.temperature == 0.0:
        return int(logits.argmax())
    scores = logits / max(settings.temperature, 1e-6)  # a smaller one makes no difference, but overflows
    ids: Tensor | None = None
    if settings.top_k is not None or settings.top_p is not None:
        from drumline.generate.limits import most_likely

        scores, ids = most_likely(scores, settings)
    drawn = int(torch.multinomial(scores.softmax(dim=0), 1, generator=generator))
    return drawn if ids is None else int(ids[drawn])
