"""Tokens of one text from an engine, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import nn

from drumline.generate.engine import Reason, Request, Scored, make_engine
from drumline.generate.sample import SampleConfig


def engine_tokens(
    model: nn.Module,
    prompt_ids: Sequence[int],
    settings: SampleConfig,
    *,
    end_of_text: int | None,
    context: int,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """The ids that `generate` yields, in the way that is fastest where the model is."""
    ends = [] if end_of_text is None else [end_of_text]
    engine, reader = make_engine(model, slots=1, context=context, ends=ends, vocabulary=vocabulary), Queued()
    engine.submit(Request(prompt=prompt_ids, settings=settings, max_tokens=settings.max_tokens, reader=reader))
    while not reader.has_ended:
        engine.step()
        while reader.ids:
            yield reader.ids.popleft()


class Queued:
    """Reads the tokens of a text, and keeps them until they are taken."""

    def __init__(self) -> None:
        self.ids: deque[int] = deque()
        self.has_ended = False

    def prompt_scored(self, tokens: list[Scored]) -> None:
        """Not asked for."""

    def token(self, token: Scored) -> bool:
        self.ids.append(token.token)
        return True

    def ended(self, reason: Reason, token: Scored | None) -> None:
        self.has_ended = True
