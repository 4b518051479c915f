"""The data of a run: token files as they are, or text that is tokenized first.

Text becomes a folder of tokens, atomically and in bounded memory: everything is written to a temporary folder, which is
renamed at the end. Much text is encoded by `drumline.encoding`: faster, by several processes, and in parts that a
killed one need not encode again.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from drumline import __version__
from drumline.config import DataConfig, TrainConfig
from drumline.data.corpus import Corpus, Labelled, utf8_bytes
from drumline.data.sources import Skipped
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import FORMAT_VERSION, TOKENIZER, Manifest, TokenWriter, is_tokens, map_split, recorded
from drumline.errors import DataError
from drumline.files import RunFolder, flush
from drumline.lazy import room

if TYPE_CHECKING:
    from drumline.data.tokens import SplitRecord, TokenFile

SAMPLE_BYTES = 32_000_000
"""Amount of text that the tokenizer is trained on."""
BATCH_BYTES = 1 << 20
"""Text per batch for the encoder."""
FAST_BYTES = 2 << 20
"""From this size on disk on, text is encoded by `drumline.encoding`, which takes a moment to load."""
REPORT_BYTES = 1 << 20
"""Text between two progress reports."""


Stage = Literal["reading", "learning", "encoding", "joining", "packing"]


@dataclass(frozen=True)
class Progress:
    """Progress of a stage."""

    stage: Stage
    """Reading text for tokenizer training and validation; training the tokenizer; encoding; joining what is encoded."""
    bytes_done: int
    """Bytes of the source on disk, as compressed there. If its size is unknown, and during training: of the text."""
    bytes_total: int | None
    """bytes_done at the end of the stage; an estimate while reading. None if unknown."""
    text_bytes: int
    """Bytes of text read, trained on or encoded in this stage."""
    bytes_before: int = 0
    """What of bytes_done others have done, or this process before it was killed."""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the tokens."""

    corpus: Corpus
    tokenizer: Tokenizer | None = None
    """Default: train a tokenizer on a sample of the training text."""
    vocab_size: int = 32768
    """Vocabulary size of a newly trained tokenizer."""
    fast: bool = True
    """Whether much text may be encoded by a faster encoder; the tokens are the same."""

    @cached_property
    def is_large(self) -> bool:
        return (self.corpus.size_bytes() or FAST_BYTES) >= FAST_BYTES

    @cached_property
    def corpus_key(self) -> list[str | float]:
        """The key of the text before it was read, so that later changes are noticed."""
        return self.corpus.key()

    @cached_property
    def key(self) -> str:
        # Earlier versions trained the tokenizer on the beginning of much text.
        vocabulary = self.tokenizer.sha256 if self.tokenizer else self.vocab_size
        vocabulary = f"sample {vocabulary}" if self.is_large and not self.tokenizer else vocabulary
        content = json.dumps([FORMAT_VERSION, vocabulary, *self.corpus_key])
        return hashlib.sha256(content.encode()).hexdigest()

    def writer(self, folder: Path, split: str, tokenizer: Tokenizer) -> TokenWriter:
        """Writes what `encoder` makes of documents."""
        return TokenWriter(folder, split, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text)

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Sequence[str]], Sequence[Any]]:
        """Texts -> what a writer adds of each; threads may call it at the same time."""
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
    before_bytes: int = 0
    """Text that was encoded already, by a process that was killed."""


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
    mix: Any = None
    """A `mixes.Mix`, if there are several sources; `train` and `valid` are then those of all, one after the other."""
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By split, what tells a file that has no sha256 from others (`files.sampled`)."""

    def origin(self) -> str:
        """What data.json says: where the data are, and which, so that a run can be used from anywhere."""
        train = {"train": str(self.train.path.absolute()), "sha256": self.train.sha256, "tokens": len(self.train)}
        return json.dumps({"cwd": os.getcwd(), **train, "text_bytes": self.train.text_bytes}, indent=2) + "\n"


def open_data(config: TrainConfig, *, run: RunFolder | None = None, progress: ProgressCallback | None = None) -> Data:
    """Token files as they are; text is tokenized first, unless it was already. run: the run that is resumed or used"""
    data = _opened(config, run, progress)
    return data if config.data.packing == "stream" else room("packing").packed(config, data, progress)


def _opened(config: TrainConfig, run: RunFolder | None, progress: ProgressCallback | None) -> Data:
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
        from drumline.data.opening import refuse_tokens_beside_text

        refuse_tokens_beside_text(data)
    corpus = Corpus(data.train_data_path, data.field, data.on_error, data.valid_data_path, data.valid_fraction)
    recipe = Recipe(corpus, Tokenizer.load(data.tokenizer) if data.tokenizer else None, data.vocab_size or 0)
    recipe = room("chats").chat_recipe(recipe, data.tokenizer) if data.format == "chat" else recipe
    return prepare(recipe, Path(data.data_dir, recipe.folder_name), progress=progress)


def prepare(recipe: Recipe, out: str | Path, *, progress: ProgressCallback | None = None, workers: int = 1) -> Prepared:
    """Write the tokens to the folder `out`, unless they are there already.

    workers: processes that encode much text; others that prepare the same to the same folder share the work too
    """
    started = time.perf_counter()
    out, source, skipped = Path(os.path.abspath(out)), Path(recipe.corpus.source), Skipped()
    if source.is_dir() and out.is_relative_to(os.path.abspath(source)):
        raise DataError(f"{out} is inside the text folder {source}", fix="choose another folder for the tokens")
    manifest, before_bytes = existing(out, recipe), 0
    reused, progress = manifest is not None, progress or (lambda _: None)
    try:
        if manifest is None and recipe.is_large:
            manifest, before_bytes = room("encoding").prepared_in_parts(recipe, out, progress, skipped, workers)
        manifest = manifest or written(recipe, out, lambda folder: _fill(folder, recipe, progress, skipped))
    except OSError as error:  # problems with the text raise DataError
        from drumline.data.opening import not_writable

        raise not_writable(out, error) from error
    return Prepared(out, manifest, time.perf_counter() - started, skipped, reused, before_bytes)


def existing(out: Path, recipe: Recipe) -> Manifest | None:
    """The manifest of `out` if it has the right content; None if it does not exist."""
    key = recipe.key  # before anything is read
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    from drumline.data.opening import manifest_of_key

    return manifest_of_key(out, key, source=recipe.corpus.source)


def written(recipe: Recipe, out: Path, fill: Callable[[Path], Manifest]) -> Manifest:
    """Let `fill` write to a temporary folder next to `out`, then rename it."""
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
        manifest: Manifest | None = fill(partial)
        flush(partial)
        try:
            partial.rename(out)
        except OSError:
            # Another process may have created it in the meantime.
            if (manifest := existing(out, recipe)) is None:
                raise
        flush(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # not empty, unless there is no result
                path.rmdir()
    assert manifest is not None
    return manifest


def _fill(folder: Path, recipe: Recipe, progress: ProgressCallback, skipped: Skipped) -> Manifest:
    """Write every file of a prepared folder, the manifest last."""
    corpus = recipe.corpus
    sample_bytes = 0 if recipe.tokenizer else SAMPLE_BYTES
    meter = Meter("reading", progress, source_bytes=corpus.size_bytes(), text_limit=sample_bytes)
    sample, cut_bytes = corpus.survey(corpus.reading(meter.on_bytes), sample_bytes=sample_bytes, on_text=meter.on_text)
    tokenizer = recipe.tokenizer or learned(sample, vocab_size=recipe.vocab_size, progress=progress)
    meter = Meter("encoding", progress, source_bytes=corpus.size_bytes())
    text = corpus.labelled(corpus.reading(meter.on_bytes, skipped), cut_bytes=cut_bytes)
    encode = recipe.encoder(tokenizer)
    encoded = ((batch, encode([each.text for _, each in batch.documents])) for batch in in_batches(text, meter))
    splits, paths = write_splits(folder, recipe, tokenizer, encoded, meter)
    return finished(folder, recipe, tokenizer, splits, paths)


def write_splits(
    folder: Path, recipe: Recipe, tokenizer: Tokenizer, encoded: Iterable[tuple[Batch, Sequence[Any]]], meter: Meter
) -> tuple[dict[str, SplitRecord], list[Path]]:
    """Write encoded text to a folder: what each split has, and all of their files."""
    writers = {label: recipe.writer(folder, label, tokenizer) for label in recipe.corpus.labels}
    try:
        for batch, ids_of_documents in encoded:
            for (label, document), ids in zip(batch.documents, ids_of_documents, strict=True):
                writers[label].add(document.name, ids, text_bytes=utf8_bytes(document.text), more=document.more)
            meter.on_text(batch.text_bytes, read_bytes=batch.read_bytes)
        meter.report()
        splits: dict[str, SplitRecord] = {label: writer.close() for label, writer in writers.items()}
        return splits, [path for writer in writers.values() for path in writer.paths]
    finally:
        for writer in writers.values():
            writer.abandon()


def finished(
    folder: Path, recipe: Recipe, tokenizer: Tokenizer, splits: dict[str, SplitRecord], paths: Sequence[Path]
) -> Manifest:
    """Write what a folder needs besides its splits, whose files are `paths`: the tokenizer, and the manifest."""
    for label, record in splits.items():
        if record.documents == 0:
            raise DataError(f"{recipe.corpus.source} is too short for {label} data", fix="use more text")
    tokenizer.save(folder / TOKENIZER)
    manifest = Manifest(
        drumline_version=__version__,
        source=recipe.corpus.source,
        source_key=str(recipe.corpus_key[0]),
        key=recipe.key,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        splits=splits,
        files=recorded([folder / TOKENIZER, *paths]),
    )
    manifest.write(folder)
    return manifest


def learned(sample: Sequence[str], *, vocab_size: int, progress: ProgressCallback) -> Tokenizer:
    """A tokenizer that is trained on some text."""
    meter = Meter("learning", progress, text_limit=sum(map(utf8_bytes, sample)))

    def metered() -> Iterator[str]:
        for text in sample:
            yield text
            meter.on_text(utf8_bytes(text))
        meter.report()

    return Tokenizer.train(metered(), vocab_size=vocab_size)


class Meter:
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
class Batch:
    """Documents that are encoded together."""

    documents: list[Labelled]
    text_bytes: int
    read_bytes: int
    """Bytes read from disk up to its end."""


def in_batches(text: Iterable[Labelled], meter: Meter) -> Iterator[Batch]:
    """Documents in batches of about BATCH_BYTES."""
    documents, text_bytes = list[Labelled](), 0
    for label, document in text:
        documents.append((label, document))
        text_bytes += utf8_bytes(document.text)
        if text_bytes >= BATCH_BYTES:
            yield Batch(documents, text_bytes, meter.read_bytes)
            documents, text_bytes = [], 0
    yield Batch(documents, text_bytes, meter.read_bytes)
