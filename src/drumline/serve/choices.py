"""The tokens of one choice -> pieces of its text, in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drumline.data import Tokenizer
from drumline.generate import Reason, Scored, StoppingText


@dataclass(frozen=True)
class Placed:
    """A token and where its text begins, in characters of the choice's text."""

    scored: Scored
    offset: int


@dataclass(frozen=True)
class Piece:
    """More text of a choice, with the tokens that begin in it; the last piece has a reason."""

    index: int
    text: str
    tokens: list[Placed]
    reason: Reason | None = None
    made: int = 0
    """In the last piece: the number of tokens generated."""


class Choice:
    """Reads the tokens of a request (see `Reader`) and posts pieces of text.

    echoed: the ids of the prompt, if its text is part of the answer
    stream: post pieces as they come, and not only one at the end
    scores_end: the token that ends the text is among those with a log probability, though not in the text
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        post: Callable[[Piece], None],
        *,
        stops: tuple[str, ...],
        stream: bool,
        echoed: list[int] | None,
        scores_end: bool,
    ) -> None:
        self._scores_end = scores_end
        self._index, self._tokenizer, self._post, self._stream = index, tokenizer, post, stream
        self._writing = StoppingText(tokenizer, stops)
        self._start = 0
        """Characters of the echo."""
        self._unsent, self._sent = "", 0
        self._tokens: list[Placed] = []
        """Tokens that begin after what was sent."""
        self._made = 0
        if echoed:
            self._echo([Scored(token) for token in echoed])

    def prompt_scored(self, tokens: list[Scored]) -> None:
        self._unsent, self._tokens = "", []
        self._echo(tokens)

    def token(self, token: Scored) -> bool:
        self._made += 1
        self._tokens.append(Placed(token, self._start + self._writing.chars))
        self._unsent += self._writing.push(token.token)
        if self._stream and self._unsent:
            self._send()
        return not self._writing.stopped

    def ended(self, reason: Reason, token: Scored | None) -> None:
        self._unsent += self._writing.flush()
        if token is not None and self._scores_end:
            self._tokens.append(Placed(token, self._start + self._writing.chars))
        self._send("stop" if self._writing.stopped else reason)

    def _echo(self, tokens: list[Scored]) -> None:
        echo = StoppingText(self._tokenizer)
        for token in tokens:
            self._tokens.append(Placed(token, echo.chars))
            self._unsent += echo.push(token.token)
        self._unsent += echo.flush()
        self._start = len(self._unsent)

    def _send(self, reason: Reason | None = None) -> None:
        self._sent += len(self._unsent)
        # Tokens of a stop string are no part of the answer; others may have no text of their own.
        everything = reason is not None and not self._writing.stopped
        ready = [each for each in self._tokens if everything or each.offset < self._sent]
        self._tokens = self._tokens[len(ready) :]
        self._post(Piece(self._index, self._unsent, ready, reason, self._made))
        self._unsent = ""
