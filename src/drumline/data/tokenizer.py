"""The tokenizer: text to ids and back, losslessly. Handles byte-level BPE and tokenizer.json, not token files.

A tokenizer trained here covers all 256 bytes, so every text has ids and `decode(encode(text)) == text`. Text is never
parsed for special tokens: a document that contains `<|endoftext|>` becomes ordinary tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from drumline.errors import ConfigError, DataError
from drumline.signals import in_background

END_OF_TEXT = "<|endoftext|>"
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""Names of the end-of-text token in tokenizers, in order of preference."""

SMALLEST_VOCAB = 257
"""The 256 bytes and the end-of-text token."""

PIECE_CHARS = 1 << 15
"""Piece size for long texts. Pieces use all cores, and need a quarter of the memory."""
_BETWEEN_WORDS = re.compile(r"[^\W_](?=[ \n][^\W_])").search
"""A letter or digit, then a space or newline, then a letter or digit. No token spans it: see `_may_cut`."""


class EncoderError(Exception):
    """A faster encoder cannot be used, or gives other ids than `Tokenizer`; says why."""


class Tokenizer:
    """A tokenizer.json in use. Immutable, so threads may share it."""

    def __init__(self, serialized: bytes, *, origin: str = "the tokenizer") -> None:
        """serialized: the content of a tokenizer.json. origin: its source, for error messages."""
        try:
            inner = tokenizers.Tokenizer.from_str(serialized.decode())
        except Exception as error:  # the library raises a bare Exception for anything it cannot parse
            raise DataError(
                f"{origin} is not a tokenizer.json: {error}",
                fix="use the tokenizer.json of a Hugging Face tokenizer, or drop --tokenizer to train one",
            ) from error
        if inner.truncation is not None or inner.padding is not None:
            # Saved with a model's sequence length: documents would be truncated or padded silently.
            inner.no_truncation()
            inner.no_padding()
            serialized = inner.to_str(pretty=True).encode()
        inner.encode_special_tokens = True
        self._inner = inner
        self.serialized = serialized
        """The content of its tokenizer.json."""
        self._cuts = _may_cut(serialized)
        self.end_of_text = self._find_end_of_text(origin)
        """The id that ends every document."""

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
        """Train a vocabulary of at most `vocab_size` ids; the same texts give the same file."""
        if vocab_size < SMALLEST_VOCAB:
            raise ConfigError(f"vocab_size {vocab_size} is too small", fix=f"use --vocab_size {SMALLEST_VOCAB} or more")
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        in_background(lambda: inner.train_from_iterator(texts, trainer)).result()
        return cls(inner.to_str(pretty=True).encode(), origin="the trained tokenizer")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json, drumline's or any other."""
        try:
            serialized = Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", fix="use a path of a tokenizer.json") from error
        return cls(serialized, origin=str(path))

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        return Tokenizer, (self.serialized,)  # for other processes; the library's own pickle forgets a setting

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json; a loaded one is written back byte for byte."""
        Path(path).write_bytes(self.serialized)

    def encode(self, text: str) -> list[int]:
        """Ids of one text, without an end-of-text token."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as from `encode`, on all cores and with the GIL released."""
        pieces = [self.pieces(text) for text in texts]
        encodings = iter(self._inner.encode_batch_fast(list(chain.from_iterable(pieces)), add_special_tokens=False))
        return [list(chain.from_iterable(next(encodings).ids for _ in its_pieces)) for its_pieces in pieces]

    def pieces(self, text: str) -> list[str]:
        """A text in pieces of about PIECE_CHARS whose ids, one after the other, are its ids."""
        pieces, start = [], 0
        while self._cuts and (word := _BETWEEN_WORDS(text, start + PIECE_CHARS)):
            pieces.append(text[start : word.end()])
            start = word.end()
        return [*pieces, text[start:]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, including special tokens. Invalid UTF-8 becomes U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids: one more than the largest, including added tokens."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self.serialized).hexdigest()

    def _find_end_of_text(self, origin: str) -> int:
        for token in ENDS_OF_TEXT:
            if (token_id := self._inner.token_to_id(token)) is not None:
                return int(token_id)
        raise DataError(
            f"{origin} has no end-of-text token (looked for {', '.join(ENDS_OF_TEXT)})",
            fix=f"add {END_OF_TEXT} to it as a special token, or drop --tokenizer to train one",
        )


def _may_cut(serialized: bytes) -> bool:
    """Whether a text may be split between words without changing its ids.

    True if there is no normalizer and GPT-2's pattern is the first pre-tokenizer: the pattern never joins a letter or
    digit with whitespace after it, and how it matches one does not depend on the other.
    """
    content = json.loads(serialized)
    splitter = content.get("pre_tokenizer") or {}
    return (
        content.get("normalizer") is None
        and splitter.get("type") == "ByteLevel"
        and splitter.get("add_prefix_space") is False
        and splitter.get("use_regex", True) is True
        and all(token["special"] for token in content.get("added_tokens", []))
    )
