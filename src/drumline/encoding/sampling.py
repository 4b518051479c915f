"""A sample of a whole corpus, for training the tokenizer: by document, drawn by a seed, from everywhere in it."""

from __future__ import annotations

import hashlib
import heapq
import random
from bisect import bisect
from collections import Counter
from itertools import accumulate

from drumline.data import Meter, Reading, utf8_bytes
from drumline.encoding.stretches import Stretches

SAMPLE_BYTES = 32_000_000
"""Amount of text that the tokenizer is trained on."""
READ_BYTES = 1 << 30
"""Smaller text is read as a whole; of larger text, as much as this, on disk."""
PLACES = 128
"""Of larger text: where it is read, evenly spaced, so that each file counts by its size."""


def sampled(stretches: Stretches, meter: Meter, *, sample_bytes: int) -> tuple[list[str], bool]:
    """Training text of about `sample_bytes`, and whether any was held out; of each long document, parts of at most a
    MiB are drawn."""
    corpus = stretches.corpus
    heap: list[tuple[int, int, str]] = []
    count = total_bytes = 0
    has_held_out = False
    for number, most_bytes in _drawn(stretches):
        read_bytes, is_on_disk = 0, stretches.all[number].size_bytes > 0

        def on_bytes(new_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += new_bytes
            meter.on_bytes(new_bytes)

        reading: Reading = corpus.reading(on_bytes)
        for label, document in stretches.read(number, reading):
            has_held_out = has_held_out or label == "valid"
            size_bytes = utf8_bytes(document.text)
            read_bytes += 0 if is_on_disk else size_bytes
            if label == "train":
                count += 1
                name = f"{corpus.seed}\0{count}\0{document.name}".encode(errors="backslashreplace")
                draw = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
                heapq.heappush(heap, (-draw, count, document.text))
                total_bytes += size_bytes
                while total_bytes - (largest := utf8_bytes(heap[0][2])) >= sample_bytes:
                    heapq.heappop(heap)
                    total_bytes -= largest
                meter.on_text(size_bytes)
            if most_bytes is not None and read_bytes >= most_bytes:
                break
    return [text for _, _, text in sorted(heap, key=lambda each: each[1])], has_held_out


def _drawn(stretches: Stretches) -> list[tuple[int, int | None]]:
    """Which stretches to read, and how many bytes of each; None: all of it."""
    numbers = [number for number, each in enumerate(stretches.all) if not each.held_out]
    ends = list(accumulate(stretches.all[number].size_bytes for number in numbers))
    if ends[-1] <= READ_BYTES and (ends[-1] or len(numbers) > 1):
        return [(number, None) for number in numbers]
    # Of a source of unknown size, there is nothing but its beginning that can be read in a bounded time.
    if not ends[-1]:
        return [(numbers[0], READ_BYTES)]
    first = random.Random(stretches.corpus.seed).random()
    places = (int((place + first) * ends[-1] / PLACES) for place in range(PLACES))
    counts = Counter(numbers[min(bisect(ends, place), len(numbers) - 1)] for place in places)
    return [(number, count * (READ_BYTES // PLACES)) for number, count in sorted(counts.items())]
