"""A byte-level BPE tokenizer, trained by gigatoken: the same merges as by the tokenizers library, faster.

It is trained by another process, because the library writes to the terminal and keeps its threads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import tokenizers

from drumline.data import (
    END_OF_TEXT,
    SMALLEST_VOCAB,
    EncoderError,
    Meter,
    ProgressCallback,
    Tokenizer,
    utf8_bytes,
)
from drumline.encoding.fast import FastTokenizer

_SEPARATOR = b"\xff"  # in no UTF-8
_BYTES_PER_TOKEN = 500
"""Of the sample. With less, most merges are of rare pairs, and gigatoken takes longer (benchmarks/learning.py)."""
_PROGRAM = r"""
import json, pathlib, sys
from gigatoken.gigatoken_rs import train_bpe
text, merges, vocab_size, end_of_text = sys.argv[1:]
made = train_bpe(pathlib.Path(text).read_bytes(), int(vocab_size), [end_of_text], separator=b"\xff")[1]
pathlib.Path(merges).write_text(json.dumps([[a.hex(), b.hex()] for a, b in made]))
"""


def train(sample: Sequence[str], *, vocab_size: int, folder: Path, progress: ProgressCallback) -> tuple[Tokenizer, str]:
    """A tokenizer trained on some text, and what to say of it; folder: for temporary files"""
    started = time.perf_counter()
    text_bytes = sum(map(utf8_bytes, sample))
    meter = Meter("learning", progress, text_limit=text_bytes)
    tokenizer: Tokenizer | None = None
    if text_bytes >= _BYTES_PER_TOKEN * vocab_size:
        tokenizer = fast_trained(sample, vocab_size=vocab_size, folder=folder)
    tokenizer = tokenizer or Tokenizer.train(sample, vocab_size=vocab_size)
    meter.on_text(text_bytes)
    meter.report()
    seconds = time.perf_counter() - started
    return tokenizer, f"; tokenizer trained on a sample of {text_bytes / 1e6:.1f} MB in {seconds:.1f} s"


def fast_trained(sample: Sequence[str], *, vocab_size: int, folder: Path) -> Tokenizer | None:
    """The tokenizer that `Tokenizer.train` gives; None if it must do that itself."""
    if vocab_size <= SMALLEST_VOCAB:
        return None
    text, merges = folder / "sample.txt", folder / "merges.json"
    try:
        text.write_bytes(_SEPARATOR.join(each.encode() for each in sample))
        words = [sys.executable, "-c", _PROGRAM, str(text), str(merges), str(vocab_size), END_OF_TEXT]
        done = subprocess.run(words, check=False, capture_output=True)
        if done.returncode != 0:
            return None
        tokenizer = _of_merges([(bytes.fromhex(a), bytes.fromhex(b)) for a, b in json.loads(merges.read_bytes())])
    finally:
        for path in (text, merges):
            path.unlink(missing_ok=True)
    # Where pairs that occur twice run out, it merges those that occur once, and those that no longer occur, even a
    # second time: then what is needed is the merges before them.
    is_full = tokenizer.vocab_size == vocab_size
    with suppress(EncoderError):
        return tokenizer if is_full and _last_occurs_twice(tokenizer, sample) else None
    return None


def _of_merges(merges: Sequence[tuple[bytes, bytes]]) -> Tokenizer:
    content = json.loads(Tokenizer.train([], vocab_size=SMALLEST_VOCAB).serialized)
    letters = _letters()
    pairs = [tuple("".join(letters[byte] for byte in half) for half in pair) for pair in merges]
    content["model"]["merges"] = pairs
    vocabulary = content["model"]["vocab"]
    for first, second in pairs:
        vocabulary.setdefault(first + second, len(vocabulary))
    inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    return Tokenizer(inner.to_str(pretty=True).encode(), origin="the trained tokenizer")


def _letters() -> list[str]:
    """How byte-level BPE writes each byte as a printable character."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _last_occurs_twice(tokenizer: Tokenizer, sample: Sequence[str]) -> bool:
    """Whether the rarest pair was merged more than once, so that all others were."""
    encode, count = FastTokenizer(tokenizer).encode_batch, 0
    for text in sample:
        count += int(np.count_nonzero(encode([text])[0] == tokenizer.vocab_size - 1))
        if count >= 2:
            return True
    return False
