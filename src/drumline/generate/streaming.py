"""Text that is shown while it is written."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from drumline.data import Tokenizer
from drumline.errors import DataError
from drumline.generate.sample import SampleConfig, generate
from drumline.model import GPT


def sample_text(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, settings: SampleConfig, *, context: int | None
) -> Iterator[str]:
    """What the model writes after the prompt, piece by piece. context: of models other than a GPT"""
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode(prompt)
    if isinstance(model, GPT):
        check_prompt(ids, vocab_size=model.config.vocab_size)
    for token in generate(model, ids, settings, end_of_text=tokenizer.end_of_text, context=context):
        yield decoder.push(token)
    yield decoder.flush()


def check_prompt(prompt_ids: list[int], *, vocab_size: int) -> None:
    """Refuse ids that the model has no embedding for."""
    strangers = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if strangers:
        raise DataError(
            f"the prompt has token {strangers[0]}, but the model knows only 0 to {vocab_size - 1}",
            fix="encode the prompt with the tokenizer the model was trained with",
        )


class StreamDecoder:
    """Text from ids that come one at a time; what it gives, joined, is the decoding of all of them.

    An id can end within a character, and in some tokenizers a token's text depends on the one before it. So the last
    piece that was given is kept and decoded again with the new ids, and text waits while it ends in U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoded: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is now complete; empty while a character is cut."""
        self._pending.append(token)
        text = self._pending_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._decoded, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """What is still pending, at the end; half a character comes out as U+FFFD."""
        text = self._pending_text()
        self._decoded, self._pending = [], []
        return text

    def _pending_text(self) -> str:
        decoded_chars = len(self._tokenizer.decode(self._decoded))
        return self._tokenizer.decode(self._decoded + self._pending)[decoded_chars:]
