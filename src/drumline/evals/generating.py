"""Text until a stop string, for many prompts at once."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.data import Tokenizer
from drumline.evals.scoring import Scorer, evaluating
from drumline.generate import Reason, Request, SampleConfig, Scored, make_engine


def continuations(scorer: Scorer, prompts: Sequence[str], *, until: Sequence[str], settings: SampleConfig) -> list[str]:
    """What the model writes after each prompt, up to the first stop string, which is not part of it.

    At most half of the context is written; the end of a prompt that does not fit beside that is used. Each text has its
    own random numbers, so that it does not depend on what else is in its batch.
    """
    tokenizer = scorer.tokenizer
    most = min(settings.max_tokens, max(1, scorer.context // 2))
    stops = (*until, tokenizer.decode([tokenizer.end_of_text]))
    encoded = [tokenizer.encode(prompt) or [tokenizer.end_of_text] for prompt in prompts]
    readers = [_Continuation(tokenizer, stops) for _ in prompts]
    with evaluating(scorer.model):
        engine = make_engine(
            scorer.model,
            slots=max(1, min(scorer.batch_size, len(prompts))),
            context=scorer.context,
            ends=[],
            vocabulary=tokenizer.vocab_size,
        )
        for ids, reader in zip(encoded, readers, strict=True):
            kept = ids[-max(1, scorer.context - most) :]
            engine.submit(Request(prompt=kept, settings=settings, max_tokens=most, reader=reader))
        while engine.active or engine.waiting:
            engine.step()
    return [reader.text for reader in readers]


class _Continuation:
    """Reads the tokens of a text until a stop string, or the text of the end of a document, is in it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._ids: list[int] = []
        self.text = ""

    def prompt_scored(self, tokens: list[Scored]) -> None:
        """Not asked for."""

    def token(self, token: Scored) -> bool:
        self._ids.append(token.token)
        self.text = self._tokenizer.decode(self._ids)
        places = [place for stop in self._stops if (place := self.text.find(stop)) >= 0]
        self.text = self.text[: min(places, default=len(self.text))]
        return not places

    def ended(self, reason: Reason, token: Scored | None) -> None:
        """All that was written is there."""
