"""Which documents share a window: computed once for a context, stored beside the tokens, memory-mapped.

    train.packed-1024.bin    little-endian: uint64 (windows + 1,) where the segments of each window begin,
                             uint64 (segments,) their first tokens, uint32 (segments,) their lengths
    train.packed-1024.json   what it is of, and its hash; written last

It can be computed again at any time and gives the same bytes, so one that is damaged or of other tokens is replaced.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from drumline.data import Progress, ProgressCallback, TokenFile
from drumline.errors import DataError
from drumline.files import Parts, file_sha256, flush, replace_text, verify
from drumline.packing.best_fit import Group, best_fit

FORMAT = "drumline-packing"
FORMAT_VERSION = 1
SEED = 0
"""Of which documents share a window. The order in which a run visits the windows has the run's seed."""
_DOCUMENTS, _TOKENS, _PIECES = 1 << 20, 1 << 30, 1 << 20
"""Documents and tokens that are looked at, and pieces that are placed, at a time."""
Ids = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class About:
    """The content of the .json file."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    context: int
    seed: int
    tokens_sha256: str
    tokens: int
    documents: int
    whole: int
    """Documents that are in one window as a whole"""
    whole_in_stream: int
    """Documents that would be, in windows that follow each other in the file"""
    windows: int
    segments: int
    sha256: str

    def line(self) -> str:
        """best_fit: 98.7% of documents whole (stream: 61.0%), 0.40% padding"""
        whole, stream = (100 * each / self.documents for each in (self.whole, self.whole_in_stream))
        padding = 100 - 100 * self.tokens / (self.windows * self.context)
        return f"best_fit: {whole:.1f}% of documents whole (stream: {stream:.1f}%), {padding:.2f}% padding"


@dataclass(frozen=True)
class Index:
    """The segments of each window: tokens start..start+length-1 of the file are its next targets."""

    about: About
    parts: Parts
    content: npt.NDArray[np.uint8]

    def segments(self, window: int) -> list[tuple[int, int]]:
        """(first token, length) of each, in order."""
        first, stop = self._read(0, window, window + 2, "<u8")
        bounds_bytes = 8 * (self.about.windows + 1)
        starts = self._read(bounds_bytes, first, stop, "<u8")
        return list(zip(starts, self._read(bounds_bytes + 8 * self.about.segments, first, stop, "<u4"), strict=True))

    def _read(self, offset: int, first: int, stop: int, dtype: str) -> list[int]:
        width = np.dtype(dtype).itemsize
        start, end = offset + first * width, offset + stop * width
        self.parts.check(start, end)
        values: list[int] = self.content[start:end].view(dtype).tolist()
        return values


def open_index(
    tokens: TokenFile, *, context: int, other_folder: Path | None = None, progress: ProgressCallback | None = None
) -> Index:
    """The index of these tokens, computed if it is not there.

    other_folder: where it is if it cannot be written beside the tokens
    """
    if tokens.document_ends is None or tokens.sha256 is None or tokens.targets is not None:
        what, fix = "no list of its documents", "tokenize the text with drumline prepare, or drop --packing"
        if tokens.targets is not None:
            what, fix = "conversations, which are packed whole without it", "drop --packing"
        raise DataError(f"--packing best_fit is for text, and {tokens.path} has {what}", fix=fix)
    if len(tokens.document_ends) == 0 or int(tokens.document_ends[-1]) != len(tokens):
        raise DataError(
            f"{tokens.path} has {len(tokens)} tokens, but the list of its documents ends elsewhere",
            fix=f"remove {tokens.path.parent} and run drumline prepare again",
        )
    places = [tokens.path.parent, *([other_folder / f"packed-{tokens.sha256[:12]}"] if other_folder else [])]
    name = f"{tokens.path.stem}.packed-{context}.bin"
    for folder in places:
        with suppress(OSError, ValueError, KeyError, TypeError, DataError):
            return _opened(folder / name, tokens, context)
    for folder in places:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / name, tokens, context, progress or (lambda _: None))
            return _opened(folder / name, tokens, context)
        except OSError as error:
            why = error
    raise DataError(
        f"{places[-1] / name} is not writable: {why.strerror or why}", fix="free up space, or choose another --data_dir"
    )


def _opened(path: Path, tokens: TokenFile, context: int) -> Index:
    """An error of any kind: there is none, or not the right one."""
    read = json.loads(path.with_suffix(".json").read_bytes())
    about = About(**{each.name: read[each.name] for each in fields(About)})
    expected = (FORMAT, FORMAT_VERSION, context, SEED, tokens.sha256, len(tokens))
    size = 8 * (about.windows + 1) + 12 * about.segments
    found = (about.format, about.format_version, about.context, about.seed, about.tokens_sha256, about.tokens)
    if found != expected or path.stat().st_size != size:
        raise ValueError(f"{path} is of other tokens")
    hashes = verify(path.parent, {path.name: about.sha256}, tokenizer="")[path.name]
    content = np.memmap(path, dtype=np.uint8, mode="r")
    parts = Parts(path, content.data, hashes)
    parts.check_some()
    return Index(about, parts, content)


def _write(path: Path, tokens: TokenFile, context: int, progress: ProgressCallback) -> None:
    """Aside, then renamed. Two processes may do so at the same time: they write the same bytes."""
    assert tokens.document_ends is not None and tokens.sha256 is not None
    ends = tokens.document_ends
    counts, whole, whole_in_stream = _surveyed(ends, context)
    groups = best_fit(counts.tolist(), context=context)
    windows, segments = sum(group.windows for group in groups), int(counts.sum())
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "r+b") as file, tempfile.TemporaryFile(dir=path.parent) as scratch:
            by_length = np.memmap(scratch, dtype=np.uint64, mode="w+", shape=(segments,))
            _sort(ends, context, counts, by_length)
            content = np.memmap(file, dtype=np.uint8, mode="w+", shape=(8 * (windows + 1) + 12 * segments,))
            _place(groups, counts, by_length, content, windows, progress)
            content.flush()
        flush(Path(aside))
        about = About(
            context=context,
            seed=SEED,
            tokens_sha256=tokens.sha256,
            tokens=len(tokens),
            documents=len(ends),
            whole=whole,
            whole_in_stream=whole_in_stream,
            windows=windows,
            segments=segments,
            sha256=file_sha256(Path(aside)),
        )
        os.chmod(aside, 0o644)  # for whoever may read the tokens
        os.replace(aside, path)
        replace_text(path.with_suffix(".json"), json.dumps(asdict(about), indent=2) + "\n")
    finally:
        Path(aside).unlink(missing_ok=True)


def _parts(ends: Ids) -> Iterator[tuple[Numbers, Numbers]]:
    """Where documents start, and their lengths, some at a time."""
    first, before = 0, 0
    while first < len(ends):
        some = np.asarray(ends[first : first + _DOCUMENTS]).astype(np.int64)
        some = some[: max(1, int(np.searchsorted(some, before + _TOKENS)))]
        starts = np.concatenate([[before], some[:-1]])
        yield starts, some - starts
        first, before = first + len(some), int(some[-1])


def _pieces(starts: Numbers, lengths: Numbers, context: int) -> tuple[Numbers, Numbers]:
    """First tokens and lengths of the pieces of documents: as many of `context` tokens as there are, and the rest."""
    each = -(-lengths // context)
    before = (np.arange(each.sum()) - np.repeat(np.cumsum(each) - each, each)) * context
    return np.repeat(starts, each) + before, np.minimum(np.repeat(lengths, each) - before, context)


def _surveyed(ends: Ids, context: int) -> tuple[Numbers, int, int]:
    """How many pieces have each length; documents that stay whole, packed and in the stream."""
    counts, whole, in_stream = np.zeros(context + 1, dtype=np.int64), 0, 0
    for starts, lengths in _parts(ends):
        counts += np.bincount(lengths % context, minlength=context + 1)
        counts[context] += (lengths // context).sum()
        whole += int((lengths <= context).sum())
        # Token n is a target of window (n - 1) // context of the stream; the first of the file is none.
        first, last = np.maximum(starts - 1, 0), np.maximum(starts + lengths - 2, 0)
        in_stream += int((first // context == last // context).sum())
    counts[0] = 0
    return counts, whole, in_stream


def _sort(ends: Ids, context: int, counts: Numbers, by_length: Ids) -> None:
    """Write the first tokens of all pieces, those of one length after another, in a random order within each."""
    bounds = np.concatenate([[0], np.cumsum(counts)])
    free = bounds[:-1].copy()
    for starts, lengths in _parts(ends):
        first, length = _pieces(starts, lengths, context)
        order = np.argsort(length, kind="stable")
        kinds, at, number = np.unique(length[order], return_index=True, return_counts=True)
        by_length[np.repeat(free[kinds] - at, number) + np.arange(len(order))] = first[order]
        free[kinds] += number
    for key in range(1, context):  # pieces that fill a window are alone in it
        some = by_length[bounds[key] : bounds[key + 1]]
        some[:] = some[np.argsort(_hash(some, key), kind="stable")]


def _hash(values: Ids, key: int) -> Ids:
    """splitmix64, elementwise, of values that differ: hashes that differ, on any machine the same."""
    values = np.asarray(values) + np.uint64(((SEED << 32) + key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _place(
    groups: list[Group],
    counts: Numbers,
    by_length: Ids,
    content: npt.NDArray[np.uint8],
    windows: int,
    progress: ProgressCallback,
) -> None:
    """Fill the windows of each group with pieces, in a random order within each window: else the short ones would
    always come last."""
    sizes = np.cumsum([8 * (windows + 1), 8 * len(by_length)])
    bounds, starts, lengths = (
        part.view(kind) for part, kind in zip(np.split(content, sizes), ("<u8", "<u8", "<u4"), strict=True)
    )
    free = np.cumsum(counts) - counts
    window, segment = 0, 0
    for group in groups:
        pieces, left = group.pieces, group.windows
        length = np.repeat([each for each, _ in group.content], [times for _, times in group.content]).astype("<u4")
        while left:
            rows = min(left, max(1, _PIECES // pieces))
            block = np.empty((rows, pieces), dtype=np.uint64)
            column = 0
            for each, times in group.content:
                taken = by_length[free[each] : free[each] + rows * times]
                block[:, column : column + times] = taken.reshape(rows, times)
                free[each] += rows * times
                column += times
            order = np.argsort(_hash(block, 0), axis=1, kind="stable")
            here = slice(segment, segment + rows * pieces)
            starts[here] = np.take_along_axis(block, order, axis=1).ravel()
            lengths[here] = length[order].ravel()
            bounds[window + 1 : window + rows + 1] = segment + pieces * np.arange(1, rows + 1)
            window, segment, left = window + rows, here.stop, left - rows
            progress(Progress("packing", here.stop * 12, len(starts) * 12, 0))
