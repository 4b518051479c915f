"""The documents of a step: which, and which of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from drumline.data import TokenFile, Tokenizer
from drumline.mixes import MixBatches, MixTokens
from drumline.packing import PackedTokens


@dataclass(frozen=True)
class Part:
    """The part of a document that is in a window."""

    window: int
    first: int
    """Its tokens are first..last-1 of the file; the last token of a window is a target only."""
    last: int
    document: str
    start: int
    """The document is start..stop-1."""
    stop: int
    source: int | None = None
    """The source in a mix that all these numbers are of, except that of the window."""


def parts_of(tokens: TokenFile, windows: Sequence[int], *, context: int) -> list[Part]:
    """The parts of documents in some windows, in order; in files that have no documents, windows count as such."""
    if isinstance(tokens, PackedTokens):
        segments = [(window, each) for window in windows for each in tokens.index.segments(window)]
        spans = [(window, start, start + length) for window, (start, length) in segments]
    else:
        spans = [(window, window * context, min(len(tokens), (window + 1) * context + 1)) for window in windows]
    if tokens.document_ends is None:
        return [Part(window, a, b, f"tokens {a:,} to {b - 1:,}", a, b) for window, a, b in spans]
    ends = tokens.document_ends
    found: list[tuple[int, int, int, int]] = []
    for window, a, b in spans:
        # uint64 needles: with Python ints, numpy would convert the whole map to float64.
        at, last = np.searchsorted(ends, np.array([a, b - 1], dtype=np.uint64), side="right").tolist()
        found += [(window, a, b, number) for number in range(at, last + 1)]
    names = _names(tokens, {number for *_, number in found})
    parts = []
    for window, a, b, number in found:
        start, stop = int(ends[number - 1]) if number else 0, int(ends[number])
        parts.append(Part(window, max(a, start), min(b, stop), names.get(number, f"document {number}"), start, stop))
    return parts


def parts_of_mix(batches: MixBatches, windows: Sequence[int]) -> list[Part]:
    """The same of a mix: the name of each document begins with that of its source."""
    placed = [batches.located(window) for window in windows]
    found: dict[tuple[int, int], list[Part]] = {}
    for source, tokens in enumerate(batches.tokens):
        own = list(dict.fromkeys(window for each, window in placed if each == source))
        for part in parts_of(tokens, own, context=batches.tokens_per_item):
            named = f"{batches.source_names[source]}: {part.document}"
            found.setdefault((source, part.window), []).append(replace(part, document=named, source=source))
    return [
        replace(part, window=window) for window, place in zip(windows, placed, strict=True) for part in found[place]
    ]


def targets_of(tokens: TokenFile, window: int, *, context: int) -> npt.NDArray[np.int64]:
    """Which token of the file is the target at each place of a window: int64 (context,); -1: padding"""
    if not isinstance(tokens, PackedTokens):
        return np.arange(window * context + 1, (window + 1) * context + 1)
    segments = [np.arange(start, start + length) for start, length in tokens.index.segments(window)]
    places = np.concatenate(segments)
    return np.pad(places, (0, context - len(places)), constant_values=-1)


def _names(tokens: TokenFile, wanted: set[int]) -> dict[int, str]:
    if tokens.names_path is None or not wanted:
        return {}
    names, most = {}, max(wanted)
    with open(tokens.names_path, encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines):
            if number in wanted:
                names[number] = line.rstrip("\n")
            if number >= most:
                break
    return names


def decoded(part: Part, tokens: TokenFile, tokenizer: Tokenizer) -> str:
    """The text of a part."""
    if part.source is not None and isinstance(tokens, MixTokens):
        tokens = tokens.parts[part.source]
    return tokenizer.decode(tokens.read(part.first, part.last).tolist())
