"""Text that is shown while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from drumline.data import Tokenizer
from drumline.errors import DataError
from drumline.generate.sample import SampleConfig, generate
from drumline.model import GPT


def sample_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    settings: SampleConfig,
    *,
    context: int | None,
    tokens: Callable[..., Iterator[int]] = generate,
) -> Iterator[str]:
    """The text that the model generates after the prompt, of tokens that the tokenizer has, piece by piece.

    context: for models other than a GPT; tokens: like `generate`
    """
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode(prompt)
    if isinstance(model, GPT):
        check_prompt(ids, vocab_size=model.config.vocab_size)
    more = {"end_of_text": tokenizer.end_of_text, "context": context, "vocabulary": tokenizer.vocab_size}
    for token in tokens(model, ids, settings, **more):
        yield decoder.push(token)
    yield decoder.flush()


def check_prompt(prompt_ids: list[int], *, vocab_size: int) -> None:
    """Reject ids that the model has no embedding for."""
    strangers = [token for token in prompt_ids if not 0 <= token < vocab_size]
    if strangers:
        raise DataError(
            f"the prompt contains token {strangers[0]}, but the model's vocabulary is 0 to {vocab_size - 1}",
            fix="encode the prompt with the tokenizer that the model was trained with",
        )


class StreamDecoder:
    """Text from ids that come one at a time; the pieces, joined, equal the decoding of all ids.

    An id can end within a character, and in some tokenizers a token's text depends on the one before. So the last
    piece is kept and decoded again with the new ids, and text is held back while it ends in U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoded: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The newly completed text; empty while a character is incomplete."""
        self._pending.append(token)
        text = self._pending_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._decoded, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """The remaining text; an incomplete character becomes U+FFFD."""
        text = self._pending_text()
        self._decoded, self._pending = [], []
        return text

    def _pending_text(self) -> str:
        decoded_chars = len(self._tokenizer.decode(self._decoded))
        return self._tokenizer.decode(self._decoded + self._pending)[decoded_chars:]
