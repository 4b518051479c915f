"""Encoding by gigatoken: the same ids as the tokenizers library gives, dozens of times faster.

gigatoken is young, so it is not trusted. It encodes only for tokenizers that are known to suit it (byte-level BPE), and
is compared with tokenizers on text that is hard to encode, on the beginning of the corpus, and on a piece of every
batch after that. At the first difference it raises `EncoderError`, and the text is encoded anew by tokenizers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from drumline.data import EncoderError, Tokenizer

FIRST_CHARS = 1 << 18
"""Text at the beginning of the corpus that both encode."""
PIECE_CHARS = 1024
"""Text of every later batch that both encode."""
GROWTH_BYTES = 256 << 20
"""gigatoken remembers every word it met: when memory has grown by this, it is loaded anew."""

Ids = npt.NDArray[np.uint32]

HARD_TEXT = (
    "it's we'LL 'd''ve I'M don’t _under_score 3.14 1,000,000 x²½Ⅷ٣ ABCdef camelCase<|end|></s> [INST] \\n \\\\\n"
    "/* */ #!$%"
    "  two   three\t\ttabs \t mixed\r\n\r\nlines\n\n\n   indented\n trailing   \n\x00\x01\x1b\x1c\x1d\x7f\x85\x0b\x0c"
    "\u00a0\u2000\u2028\u2029\u3000\u200b\u200d\ufeff\u180e nbsp\u00a0\u00a0 x\u3000 é e\u0301 ﬁ Å Å ß İ ǅ"
    " ñ n\u0303\u0323"
    "太鼓を叩く。 한국어 텍스트 हिन्दी ไทย العربية עברית Ελληνικά 𝔘𝔫𝔦 👩‍👩‍👧‍👦🏳️‍🌈🥁 \U0010ffff\ue000\ufffd�"
    + "a" * 300 + " " * 300 + "\n" * 50 + "!?" * 100 + "ab" * 200 + "7" * 100 + "é" * 100 + "太" * 100 + " a" * 100
)  # fmt: skip


class FastTokenizer:
    """A tokenizer by gigatoken, compared with tokenizers all along: EncoderError if it differs. Shared by threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        content = json.loads(tokenizer.serialized)
        _check_supported(content)
        specials = [token["content"] for token in content["added_tokens"]]
        # Special tokens in text are plain text.
        self._serialized = json.dumps(content | {"added_tokens": [], "post_processor": None})
        self._lock = Lock()
        self._to_check = FIRST_CHARS
        self._draw = random.Random(0)
        self._load()
        texts = [HARD_TEXT, "", *specials, "".join(f"a{special} {special}\n" for special in specials)]
        self._check(texts, self._encode(texts))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text: uint32 (its tokens,)."""
        encoded = self._encode(texts)
        with self._lock:
            if sample := self._sample(texts):
                self._check(sample, self._encode(sample))
            if psutil.Process().memory_info().rss > self._loaded_bytes + GROWTH_BYTES:
                self._load()
        return encoded

    def _sample(self, texts: Sequence[str]) -> list[str]:
        """Texts to compare: at first whole ones, then a piece of one of them."""
        sample = []
        for text in texts:
            if self._to_check > 0:
                sample.append(text[: self._to_check])
                self._to_check -= len(text)
        if not sample and texts:
            text = self._draw.choice(texts)
            start = self._draw.randrange(max(1, len(text) - PIECE_CHARS))
            sample = [text[start : start + PIECE_CHARS]]
        return sample

    def _load(self) -> None:
        try:
            from gigatoken.gigatoken_rs import load_hf_json
        except ImportError as error:
            raise EncoderError(f"gigatoken cannot be imported ({error}); pip install gigatoken") from error
        self._inner = _or_error(lambda: load_hf_json(self._serialized))
        self._loaded_bytes = psutil.Process().memory_info().rss

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        pieces = [self._tokenizer.pieces(text) for text in texts]
        inner, flat = self._inner, [piece.encode() for its_pieces in pieces for piece in its_pieces]
        # On this thread: the pool of the library would outlive a fork, and several batches are encoded at once anyway.
        rows = _or_error(lambda: inner.encode_batch(flat, parallel=False)).layout
        ids, ends = np.asarray(rows.content.data), np.asarray(rows.offsets.data)
        last = [0, *accumulate(map(len, pieces))]
        return [ids[ends[start] : ends[stop]] for start, stop in pairwise(last)]

    def _check(self, texts: Sequence[str], encoded: Sequence[Ids]) -> None:
        for text, ids, right in zip(texts, encoded, self._tokenizer.encode_batch(texts), strict=False):
            if not np.array_equal(ids, np.asarray(right, dtype=np.uint32)):
                same = next((n for n, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), len(right))
                before = self._tokenizer.decode(right[:same])[-20:]
                raise EncoderError(f"gigatoken gives other ids than tokenizers for {text[:20]!r}, after {before!r}")


def _check_supported(content: dict[str, Any]) -> None:
    """Only byte-level BPE whose added tokens are all special, so that none of them is looked for in text."""
    model = content["model"]
    before = content.get("pre_tokenizer") or {}
    kinds = {each.get("type") for each in (before, *before.get("pretokenizers", ()))}
    reasons = {
        f"a {model.get('type')} model": model.get("type") not in ("BPE", None),
        "byte fallback": bool(model.get("byte_fallback")),
        "no byte-level pre-tokenizer": "ByteLevel" not in kinds,
        "dropout": bool(model.get("dropout")),
        "added tokens that are not special": not all(token["special"] for token in content["added_tokens"]),
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise EncoderError(f"gigatoken is not used for a tokenizer with {found[0]}")


def _or_error(call: Callable[[], Any]) -> Any:
    """The result of a call to gigatoken, whose panics are not even Exceptions."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EncoderError(f"gigatoken cannot use this tokenizer: {reason}") from error
