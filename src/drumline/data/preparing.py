"""Text becomes a folder of tokens that is whole or not there. Knows how to encode fast in bounded memory.

The main thread reads and writes while a few threads encode. What is being encoded at a time is bounded, so memory does
not grow with the input. Everything is written into a folder beside the wanted one, which is renamed at the end.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import psutil

from drumline.config import OnError
from drumline.data.corpus import Corpus, Label, Labelled, utf8_bytes
from drumline.data.manifest import (
    FORMAT_VERSION,
    TOKENIZER,
    FileRecord,
    Manifest,
    SplitRecord,
    check_sizes,
    read_manifest,
    token_dtype,
)
from drumline.data.sources import source_key
from drumline.data.text_files import Skipped
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TokenWriter
from drumline.errors import DataError
from drumline.files import flush

SAMPLE_BYTES = 32_000_000
"""Text that a vocabulary is learned from."""
BATCH_BYTES = 1 << 20
"""Text handed to an encoder at once."""
ENCODING_BYTES = 4 << 20
"""Text being encoded at any time: each takes 30 to 120 bytes of memory, the more the longer its document."""
ENCODERS = 4
"""Threads that hand batches to the library, which itself uses all cores; several, so that no core waits for a batch."""


Stage = Literal["reading", "learning", "encoding"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far it is."""

    stage: Stage
    """Looking through the text for what to learn from and hold out; learning a vocabulary; encoding."""
    bytes_done: int
    """Of the source on disk, packed as it is; begins anew with each stage."""
    bytes_total: int | None
    """None where nobody knows."""
    text_bytes: int
    """Text that was read, or encoded, in this stage."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What `prepare` made or found."""

    path: Path
    vocab_size: int
    splits: dict[str, SplitRecord]
    seconds: float
    """From beginning to end, learning a vocabulary included."""
    skipped: Skipped
    reused: bool
    """Whether it was there already."""

    @property
    def text_bytes(self) -> int:
        return sum(split.text_bytes for split in self.splits.values())

    @property
    def mb_per_s(self) -> float:
        return self.text_bytes / 1e6 / self.seconds


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class _Recipe:
    """Everything that decides what the folder will hold."""

    corpus: Corpus
    tokenizer: Tokenizer | None
    vocab_size: int

    @cached_property
    def key(self) -> str:
        vocabulary = self.tokenizer.sha256 if self.tokenizer else self.vocab_size
        decides = json.dumps([FORMAT_VERSION, vocabulary, *self.corpus.decides()])
        return hashlib.sha256(decides.encode()).hexdigest()


def prepare(
    source: str,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 32768,
    field: str = "text",
    on_error: OnError = "stop",
    valid_source: str | None = None,
    valid_fraction: float = 0.02,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Prepared:
    """Write the tokens of `source` into the folder `out`, or find them there.

    tokenizer:      a tokenizer.json; without it one of `vocab_size` ids is learned from the first of the training text
    valid_source:   held-out text; without it the source's own validation split; without that `valid_fraction` of the
                    documents, chosen by `seed` and their names, or of the text's end where that would be none of them
    """
    corpus = Corpus(source, field, on_error, valid_source, valid_fraction, seed)
    recipe = _Recipe(corpus, Tokenizer.load(tokenizer) if tokenizer is not None else None, vocab_size)
    return _prepare(recipe, Path(os.path.abspath(out)), progress)


def cached(
    source: str,
    data_dir: str | Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 32768,
    field: str = "text",
    on_error: OnError = "stop",
    valid_source: str | None = None,
    valid_fraction: float = 0.02,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Prepared:
    """`prepare` into a folder of `data_dir` that is named after the source and everything that decides the tokens."""
    corpus = Corpus(source, field, on_error, valid_source, valid_fraction, seed)
    recipe = _Recipe(corpus, Tokenizer.load(tokenizer) if tokenizer is not None else None, vocab_size)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", Path(source).name).strip("-.")[:40] or "text"
    return _prepare(recipe, Path(os.path.abspath(data_dir), f"{slug}-{recipe.key[:12]}"), progress)


def _prepare(recipe: _Recipe, out: Path, progress: ProgressCallback | None) -> Prepared:
    started = time.perf_counter()
    source = Path(recipe.corpus.source)
    if source.is_dir() and out.is_relative_to(os.path.abspath(source)):
        raise DataError(
            f"{out} lies inside the text folder {source} and would be read as text the next time",
            fix="choose a folder elsewhere for the tokens",
        )
    skipped = Skipped()
    manifest = _finished(out, recipe)
    reused = manifest is not None
    if manifest is None:
        try:
            manifest = _make(recipe, out, progress, skipped)
        except OSError as error:  # what is wrong with the text comes as a DataError
            raise DataError(
                f"{out} cannot be written: {error.strerror or error}", fix="make room there, or choose another folder"
            ) from error
    return Prepared(
        path=out,
        vocab_size=manifest.vocab_size,
        splits=manifest.splits,
        seconds=time.perf_counter() - started,
        skipped=skipped,
        reused=reused,
    )


def _finished(out: Path, recipe: _Recipe) -> Manifest | None:
    """The manifest of `out` if it holds what the recipe makes; None where nothing is in the way."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        manifest = read_manifest(out)
    except DataError:
        manifest = None
    if manifest is None or manifest.key != recipe.key:
        holds = "is no prepared folder" if manifest is None else f"holds other tokens (of {manifest.source})"
        raise DataError(
            f"{out} exists and {holds}, not those of {recipe.corpus.source} with these settings",
            fix=f"choose another --out, or remove it: rm -r {out}",
        )
    check_sizes(out, manifest)
    return manifest


def _make(recipe: _Recipe, out: Path, progress: ProgressCallback | None, skipped: Skipped) -> Manifest:
    """Fill a folder beside `out` and rename it."""
    host = re.sub(r"\W", "_", socket.gethostname())
    _remove_leftovers(out, host)
    # The host is in the name because process ids of hosts, or containers, that share a disk say nothing to each other.
    partial = out.with_name(f"{out.name}.partial-{host}-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        manifest = _fill(partial, recipe, progress, skipped)
        flush(partial)
        try:
            partial.rename(out)
        except OSError:
            finished = _finished(out, recipe)  # somebody else may have made the same at the same time
            if finished is None:
                raise
            manifest = finished
            shutil.rmtree(partial)
        flush(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _remove_leftovers(out: Path, host: str) -> None:
    """Remove what processes of this host left unfinished when they were killed."""
    prefix = f"{out.name}.partial-{host}-"
    for path in out.parent.glob(f"{glob.escape(prefix)}*"):
        pid = path.name.removeprefix(prefix)
        if pid.isdecimal() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(path)


def _fill(folder: Path, recipe: _Recipe, progress: ProgressCallback | None, skipped: Skipped) -> Manifest:
    """Write every file of a prepared folder, the manifest last."""
    corpus = recipe.corpus
    key, state = recipe.key, source_key(corpus.source)  # before reading: a change meanwhile must not go unnoticed
    tokenizer, cut_bytes = _tokenizer(recipe, progress)
    tokenizer.save(folder / TOKENIZER)
    flush(folder / TOKENIZER)
    files = {TOKENIZER: FileRecord(bytes=(folder / TOKENIZER).stat().st_size, sha256=tokenizer.sha256)}

    writers = {
        label: TokenWriter(folder, label, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text)
        for label in corpus.labels
    }
    splits: dict[str, SplitRecord] = {}
    meter = _Meter("encoding", progress, corpus)
    try:
        text = corpus.labelled(cut_bytes=cut_bytes, skipped=skipped, on_bytes=meter.on_bytes)
        with closing(_encoded(_batches(text), tokenizer)) as batches:
            for batch in batches:
                for one in batch:
                    writers[one.label].add(one.name, one.ids, text_bytes=one.text_bytes)
                    meter.on_text(one.text_bytes)
                meter.tell()
        for label, writer in writers.items():
            if writer.documents == 0:
                raise DataError(f"{corpus.source} is too short to give {label} data", fix="use more text")
            splits[label], records = writer.close()
            files |= records
    finally:
        for writer in writers.values():
            writer.abandon()
    manifest = Manifest(
        drumline_version=_version(),
        source=corpus.source,
        source_key=state,
        key=key,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        splits=splits,
        files=files,
    )
    manifest.write(folder)
    return manifest


def _tokenizer(recipe: _Recipe, progress: ProgressCallback | None) -> tuple[Tokenizer, int | None]:
    """The tokenizer, learned if none was given, and where the text must be cut if no document is held out."""
    corpus = recipe.corpus
    meter = _Meter("reading", progress, corpus)
    sample_bytes = 0 if recipe.tokenizer else SAMPLE_BYTES
    sample, cut_bytes = corpus.survey(sample_bytes=sample_bytes, on_bytes=meter.on_bytes, on_text=meter.on_text)
    if recipe.tokenizer:
        return recipe.tokenizer, cut_bytes
    _Meter("learning", progress, corpus).tell()
    return Tokenizer.train(sample, vocab_size=recipe.vocab_size), cut_bytes


class _Meter:
    """Tells how far a stage is, every MiB or so."""

    def __init__(self, stage: Stage, progress: ProgressCallback | None, corpus: Corpus) -> None:
        self._stage, self._progress = stage, progress
        self._bytes_total = corpus.size_bytes() if progress else None
        self._bytes_done = self._bytes_told = self._text_bytes = 0

    def on_bytes(self, new_bytes: int) -> None:
        self._bytes_done += new_bytes
        if self._bytes_done - self._bytes_told >= 1 << 20:
            self.tell()

    def on_text(self, new_bytes: int) -> None:
        self._text_bytes += new_bytes

    def tell(self) -> None:
        self._bytes_told = self._bytes_done
        if self._progress:
            self._progress(
                Progress(
                    stage=self._stage,
                    bytes_done=self._bytes_done,
                    bytes_total=self._bytes_total,
                    text_bytes=self._text_bytes,
                )
            )


@dataclass(frozen=True)
class _Encoded:
    label: Label
    name: str
    ids: npt.NDArray[Any]
    text_bytes: int


def _batches(text: Iterable[Labelled]) -> Iterator[tuple[list[Labelled], int]]:
    """Documents in batches of about BATCH_BYTES, and the size of each."""
    batch: list[Labelled] = []
    size_bytes = 0
    for label, document in text:
        batch.append((label, document))
        size_bytes += utf8_bytes(document.text)
        if size_bytes >= BATCH_BYTES:
            yield batch, size_bytes
            batch, size_bytes = [], 0
    if batch:
        yield batch, size_bytes


def _encoded(batches: Iterable[tuple[list[Labelled], int]], tokenizer: Tokenizer) -> Generator[list[_Encoded]]:
    """Batches in their order, encoded ahead of their use but never more than ENCODING_BYTES of text."""
    ahead: deque[tuple[Future[list[_Encoded]], int]] = deque()
    ahead_bytes = 0
    with ThreadPoolExecutor(ENCODERS, thread_name_prefix="encoder") as encoders:
        try:
            for batch, size_bytes in batches:
                while ahead and ahead_bytes + size_bytes > ENCODING_BYTES:
                    future, its_bytes = ahead.popleft()
                    yield future.result()
                    ahead_bytes -= its_bytes
                ahead.append((encoders.submit(_encode, batch, tokenizer), size_bytes))
                ahead_bytes += size_bytes
            while ahead:
                yield ahead.popleft()[0].result()
        finally:
            encoders.shutdown(cancel_futures=True)


def _encode(batch: list[Labelled], tokenizer: Tokenizer) -> list[_Encoded]:
    dtype = token_dtype(tokenizer.vocab_size)
    ids = tokenizer.encode_batch([document.text for _, document in batch])
    return [
        _Encoded(label, document.name, np.fromiter(it, dtype, count=len(it)), utf8_bytes(document.text))
        for (label, document), it in zip(batch, ids, strict=True)
    ]


def _version() -> str:
    try:
        return importlib.metadata.version("drumline")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
