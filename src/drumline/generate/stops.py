"""Text that ends before the first of some strings, shown while it grows."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.data import Tokenizer
from drumline.generate.streaming import StreamDecoder


class StoppingText:
    """The text of ids that come one at a time, up to a stop string, which is not part of it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped = False
        self.chars = 0
        """Characters so far, with those held back."""

    def push(self, token: int) -> str:
        """The newly completed text."""
        return self._pass(self._decoder.push(token))

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text = self._pass(self._decoder.flush())
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _pass(self, text: str) -> str:
        if self.stopped:
            return ""
        self.chars += len(text)
        text = self._held + text
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]  # of the string that is complete first, wherever tokens end
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
