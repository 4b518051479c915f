"""The data of a run: token files as they are, or text that is tokenized first.

Text becomes a folder of tokens, atomically, fast, and in bounded memory.

The main thread reads and writes while a few threads encode. The amount of text being encoded is bounded, so memory does
not grow with the input. Everything is written to a temporary folder, which is renamed at the end.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drumline import __version__
from drumline.config import DataConfig, TrainConfig
from drumline.data.corpus import Corpus, Labelled, utf8_bytes
from drumline.data.sources import source_key
from drumline.data.text_files import Skipped
from drumline.data.tokenizer import EncoderError, Tokenizer
from drumline.data.tokens import FORMAT_VERSION, TOKENIZER, Manifest, TokenWriter, flushed, is_tokens, map_split
from drumline.errors import ConfigError, DataError
from drumline.files import RunFolder, flush
from drumline.lazy import room

if TYPE_CHECKING:
    from drumline.data.tokens import SplitRecord, TokenFile

SAMPLE_BYTES = 32_000_000
"""Amount of text that the tokenizer is trained on."""
BATCH_BYTES = 1 << 20
"""Text per batch for the encoder."""
ENCODING_BYTES = 4 << 20
"""Limit of text being encoded: each byte takes 30 to 120 bytes of memory, more for longer documents."""
ENCODERS = 4
"""Threads that pass batches to the library, which itself uses all cores; several, so that no core idles."""
FAST_BYTES = 2 << 20
"""From this size on disk on, text is encoded by `drumline.encoding`, which takes a moment to load."""
REPORT_BYTES = 1 << 20
"""Text between two progress reports."""


Stage = Literal["reading", "learning", "encoding"]


@dataclass(frozen=True)
class Progress:
    """Progress of a stage."""

    stage: Stage
    """Reading text for tokenizer training and validation; training the tokenizer; encoding."""
    bytes_done: int
    """Bytes of the source on disk, as compressed there. If its size is unknown, and during training: of the text."""
    bytes_total: int | None
    """bytes_done at the end of the stage; an estimate while reading. None if unknown."""
    text_bytes: int
    """Bytes of text read, trained on or encoded in this stage."""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the tokens."""

    corpus: Corpus
    tokenizer: Tokenizer | None = None
    """Default: train a tokenizer on the beginning of the training text."""
    vocab_size: int = 32768
    """Vocabulary size of a newly trained tokenizer."""
    fast: bool = True
    """Whether much text may be encoded by a faster encoder; the tokens are the same."""

    @cached_property
    def key(self) -> str:
        vocabulary = self.tokenizer.sha256 if self.tokenizer else self.vocab_size
        content = json.dumps([FORMAT_VERSION, vocabulary, *self.corpus.key()])
        return hashlib.sha256(content.encode()).hexdigest()

    def writer(self, folder: Path, split: str, tokenizer: Tokenizer) -> TokenWriter:
        """Writes what `encoder` makes of documents."""
        return TokenWriter(folder, split, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text)

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Sequence[str]], Sequence[Any]]:
        """Texts -> what a writer adds of each; threads may call it at the same time."""
        if self.fast and (self.corpus.size_bytes() or FAST_BYTES) >= FAST_BYTES:
            tokenizer = room("encoding").FastTokenizer(tokenizer)
        return tokenizer.encode_batch

    @property
    def folder_name(self) -> str:
        """A folder name that is unique for this text and these settings."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(self.corpus.source).name).strip("-.")[:40]
        return f"{name or 'text'}-{self.key[:12]}"


@dataclass(frozen=True)
class Prepared:
    """A prepared folder."""

    path: Path
    manifest: Manifest
    seconds: float
    """Total time, including training the tokenizer."""
    skipped: Skipped
    reused: bool
    """Whether it existed already."""


@dataclass(frozen=True)
class Data:
    """Training and validation data of a run."""

    train: TokenFile
    valid: TokenFile | None
    tokenizer: Tokenizer | None
    vocab_size: int
    skipped: Skipped
    """What could not be read, with --on_error skip."""
    note: str = ""
    """What else users should know."""

    def origin(self) -> str:
        """What data.json says: where the data are, and which, so that a run can be used from anywhere."""
        train = {"train": str(self.train.path.absolute()), "sha256": self.train.sha256, "tokens": len(self.train)}
        return json.dumps({"cwd": os.getcwd(), **train, "text_bytes": self.train.text_bytes}, indent=2) + "\n"


def open_data(config: TrainConfig, *, run: RunFolder | None = None, progress: ProgressCallback | None = None) -> Data:
    """Token files as they are; text is tokenized first, unless it was already. run: the run that is resumed or used"""
    if run is not None and run.data.exists():
        from drumline.data.of_run import reopened

        return reopened(config, run, progress=progress)
    made = None if is_tokens(config.data.train_data_path) else _prepared(config.data, progress)
    if made is None or made.reused or config.data.format == "chat":
        from drumline.data.opening import open_token_data

        return open_token_data(config.data, made)
    # Written and hashed by this process: there is nothing to check.
    splits = {name: map_split(made.path, made.manifest, name) for name in made.manifest.splits}
    tokenizer = Tokenizer.load(made.path / TOKENIZER)
    return Data(splits["train"], splits.get("valid"), tokenizer, tokenizer.vocab_size, made.skipped, made.skipped.note)


def _prepared(data: DataConfig, progress: ProgressCallback | None) -> Prepared:
    """The tokens of the text, in a folder of `data_dir` named after everything that determines them."""
    if data.valid_data_path is not None and is_tokens(data.valid_data_path):
        raise ConfigError(
            f"train_data_path {data.train_data_path} is text, but valid_data_path {data.valid_data_path} is tokens",
            fix="use text for both, or tokens made by one `drumline prepare` for both",
        )
    corpus = Corpus(data.train_data_path, data.field, data.on_error, data.valid_data_path, data.valid_fraction)
    recipe = Recipe(corpus, Tokenizer.load(data.tokenizer) if data.tokenizer else None, data.vocab_size or 0)
    recipe = room("chats").chat_recipe(recipe, data.tokenizer) if data.format == "chat" else recipe
    return prepare(recipe, Path(data.data_dir, recipe.folder_name), progress=progress)


def prepare(recipe: Recipe, out: str | Path, *, progress: ProgressCallback | None = None) -> Prepared:
    """Write the tokens to the folder `out`, unless they are there already."""
    started = time.perf_counter()
    out, source, skipped = Path(os.path.abspath(out)), Path(recipe.corpus.source), Skipped()
    if source.is_dir() and out.is_relative_to(os.path.abspath(source)):
        raise DataError(f"{out} is inside the text folder {source}", fix="choose another folder for the tokens")
    existing = _existing(out, recipe.key, source=recipe.corpus.source)
    try:
        manifest = existing or _make(recipe, out, progress or (lambda _: None), skipped)
    except OSError as error:  # problems with the text raise DataError
        raise DataError(
            f"{out} is not writable: {error.strerror or error}", fix="free up space, or choose another folder"
        ) from error
    return Prepared(out, manifest, time.perf_counter() - started, skipped, reused=existing is not None)


def _existing(out: Path, key: str, *, source: str) -> Manifest | None:
    """The manifest of `out` if it has the right content; None if it does not exist."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    from drumline.data.opening import manifest_of_key

    return manifest_of_key(out, key, source=source)


def _make(recipe: Recipe, out: Path, progress: ProgressCallback, skipped: Skipped) -> Manifest:
    """Write to a temporary folder next to `out`, then rename it."""
    # The host is part of the name because process ids are not unique among hosts or containers that share a disk.
    host = re.sub(r"\W", "_", socket.gethostname())
    prefix = f"{out.name}.partial-{host}-"
    if leftovers := list(out.parent.glob(f"{glob.escape(prefix)}*")):
        from drumline.data.opening import remove_leftovers

        remove_leftovers(leftovers, prefix)
    partial = out.with_name(f"{prefix}{os.getpid()}")
    made = [path for path in out.parents if not path.exists()]
    partial.mkdir(parents=True)
    try:
        try:
            manifest = _fill(partial, recipe, progress, skipped)
        except EncoderError as error:
            skipped.count, skipped.first, skipped.note = 0, [], f"; encoded slowly, by tokenizers: {error}"
            manifest = _fill(partial, replace(recipe, fast=False), progress, skipped)
        flush(partial)
        try:
            partial.rename(out)
        except OSError:
            # Another process may have created it in the meantime.
            existing = _existing(out, recipe.key, source=recipe.corpus.source)
            if existing is None:
                raise
            manifest = existing
        flush(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # not empty, unless there is no result
                path.rmdir()
    return manifest


def _fill(folder: Path, recipe: Recipe, progress: ProgressCallback, skipped: Skipped) -> Manifest:
    """Write every file of a prepared folder, the manifest last."""
    corpus = recipe.corpus
    key, text_key = recipe.key, source_key(corpus.source)  # before reading, so that later changes are noticed
    tokenizer, cut_bytes = _tokenizer(recipe, progress)
    tokenizer.save(folder / TOKENIZER)
    files = {TOKENIZER: flushed(folder / TOKENIZER)}
    meter = _Meter("encoding", progress, source_bytes=corpus.size_bytes())
    text = corpus.labelled(corpus.reading(meter.on_bytes, skipped), cut_bytes=cut_bytes)
    splits: dict[str, SplitRecord] = {}
    writers = {label: recipe.writer(folder, label, tokenizer) for label in corpus.labels}
    try:
        with closing(_encoded(_batches(text, meter), recipe.encoder(tokenizer))) as encoded:
            for batch, ids_of_documents in encoded:
                for (label, document), ids in zip(batch.documents, ids_of_documents, strict=True):
                    writers[label].add(document.name, ids, text_bytes=utf8_bytes(document.text), more=document.more)
                meter.on_text(batch.text_bytes, read_bytes=batch.read_bytes)
        meter.report()
        for label, writer in writers.items():
            if writer.documents == 0:
                raise DataError(f"{corpus.source} is too short for {label} data", fix="use more text")
            splits[label], records = writer.close()
            files |= records
    finally:
        for writer in writers.values():
            writer.abandon()
    manifest = Manifest(
        drumline_version=__version__,
        source=corpus.source,
        source_key=text_key,
        key=key,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        splits=splits,
        files=files,
    )
    manifest.write(folder)
    return manifest


def _tokenizer(recipe: Recipe, progress: ProgressCallback) -> tuple[Tokenizer, int | None]:
    """The tokenizer, trained if none was given, and where to split the text if no document is held out."""
    corpus, sample_bytes = recipe.corpus, 0 if recipe.tokenizer else SAMPLE_BYTES
    meter = _Meter("reading", progress, source_bytes=corpus.size_bytes(), text_limit=sample_bytes)
    reading = corpus.reading(meter.on_bytes)
    sample, cut_bytes = corpus.survey(reading, sample_bytes=sample_bytes, on_text=meter.on_text)
    if recipe.tokenizer:
        return recipe.tokenizer, cut_bytes
    meter = _Meter("learning", progress, text_limit=sum(map(utf8_bytes, sample)))

    def metered() -> Iterator[str]:
        for text in sample:
            yield text
            meter.on_text(utf8_bytes(text))
        meter.report()

    return Tokenizer.train(metered(), vocab_size=recipe.vocab_size), cut_bytes


class _Meter:
    """Reports the progress of a stage: at its start and after every REPORT_BYTES of text."""

    def __init__(
        self, stage: Stage, progress: ProgressCallback, *, source_bytes: int | None = None, text_limit: int = 0
    ) -> None:
        """source_bytes: size of the source on disk. text_limit: amount of text after which the stage ends, if known."""
        self._stage, self._progress = stage, progress
        self._source_bytes, self._text_limit = source_bytes, text_limit
        self.read_bytes = self._done_bytes = self._text_bytes = self._reported_bytes = 0
        self.report()

    def on_bytes(self, new_bytes: int) -> None:
        self.read_bytes += new_bytes

    def on_text(self, new_bytes: int, *, read_bytes: int | None = None) -> None:
        """read_bytes: bytes read from disk for the text so far; by default, all."""
        self._text_bytes += new_bytes
        self._done_bytes = self.read_bytes if read_bytes is None else read_bytes
        if self._text_bytes - self._reported_bytes >= REPORT_BYTES:
            self.report()

    def report(self) -> None:
        self._reported_bytes = self._text_bytes
        done, total, most = self._done_bytes, self._source_bytes, self._text_limit
        if total is None and most:
            done, total = self._text_bytes, most
        elif total is not None and most:
            total = max(done, min(total, done * most // self._text_bytes if self._text_bytes else most))
        self._progress(Progress(self._stage, done, total, self._text_bytes))


@dataclass(frozen=True)
class _Batch:
    """Documents that are encoded together."""

    documents: list[Labelled]
    text_bytes: int
    read_bytes: int
    """Bytes read from disk up to its end."""


def _batches(text: Iterable[Labelled], meter: _Meter) -> Iterator[_Batch]:
    """Documents in batches of about BATCH_BYTES."""
    documents: list[Labelled] = []
    text_bytes = 0
    for label, document in text:
        documents.append((label, document))
        text_bytes += utf8_bytes(document.text)
        if text_bytes >= BATCH_BYTES:
            yield _Batch(documents, text_bytes, meter.read_bytes)
            documents, text_bytes = [], 0
    yield _Batch(documents, text_bytes, meter.read_bytes)


def _encoded(
    batches: Iterable[_Batch], encode: Callable[..., Sequence[Any]]
) -> Generator[tuple[_Batch, Sequence[Any]]]:
    """Encoded batches in order, encoded ahead, but never more than ENCODING_BYTES of text."""
    ahead: deque[tuple[_Batch, Future[Sequence[Any]]]] = deque()
    with ThreadPoolExecutor(ENCODERS, thread_name_prefix="encoder") as encoders:
        try:
            for batch in batches:
                while ahead and sum(each.text_bytes for each, _ in ahead) + batch.text_bytes > ENCODING_BYTES:
                    first, ids = ahead.popleft()
                    yield first, ids.result()
                texts = [document.text for _, document in batch.documents]
                ahead.append((batch, encoders.submit(encode, texts)))
            for batch, ids in ahead:
                yield batch, ids.result()
        finally:
            encoders.shutdown(cancel_futures=True)
