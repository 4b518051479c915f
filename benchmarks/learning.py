"""Seconds that gigatoken and tokenizers take to train a tokenizer, by bytes of sample for each token.

    python benchmarks/learning.py [--source FILE] [--vocab_size 4096 50257] [--bytes_per_token 100 200 500 1000]

Both train on the same documents, in turns. `prepare` trains by gigatoken from `learning._BYTES_PER_TOKEN` on; where
gigatoken's merges are not those of tokenizers, its column says "other".
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from header import header

from drumline.data import Tokenizer, documents
from drumline.encoding.learning import fast_trained


def beginning(source: str, size: int) -> Iterator[str]:
    """Documents from the beginning of the source, of `size` bytes together; ValueError if it has less."""
    for document in documents(source):
        part = document.text.encode()[:size].decode(errors="ignore")
        yield part
        size -= len(part.encode())
        if size <= 4:  # a character may have been cut
            return
    raise ValueError(f"{source} has {size:,} bytes too few")


def compare(source: str, *, vocab_size: int, bytes_per_token: int) -> None:
    """A line with the seconds of both."""
    try:
        sample = list(beginning(source, vocab_size * bytes_per_token))
    except ValueError as error:
        print(f"{vocab_size:>10,}{bytes_per_token:>17,}  not measured: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        fast = fast_trained(sample, vocab_size=vocab_size, folder=Path(folder))
        between = time.perf_counter()
        plain = Tokenizer.train(sample, vocab_size=vocab_size)
        ended = time.perf_counter()
    merges = "same" if fast is not None and fast.serialized == plain.serialized else "other"
    fast_s, plain_s = between - began, ended - between
    print(f"{vocab_size:>10,}{bytes_per_token:>17,}{fast_s:>13.2f}{plain_s:>13.2f}{plain_s / fast_s:>8.2f}  {merges}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="builtin", help="text: anything that `drumline prepare` takes")
    parser.add_argument("--vocab_size", type=int, nargs="+", default=[4096, 50257])
    parser.add_argument("--bytes_per_token", type=int, nargs="+", default=[100, 200, 500, 1000])
    options = parser.parse_args()
    header()
    print(f"load      {os.getloadavg()[0]:.1f}")
    print("vocabulary  bytes per token  gigatoken s  tokenizers s   ratio  merges")
    for vocab_size in options.vocab_size:
        for bytes_per_token in options.bytes_per_token:
            compare(options.source, vocab_size=vocab_size, bytes_per_token=bytes_per_token)


if __name__ == "__main__":
    main()
