"""Much text -> a folder of tokens, in parts: by one process or several, and not again what a killed one has encoded.

Processes share nothing but a folder (see `journal`): each takes the next stretch of the text that no other has, so it
does not matter how many there are, when they start, or on which hosts. Who is last joins the parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.data import (
    TOKENIZER,
    Batch,
    Corpus,
    EncoderError,
    Manifest,
    Meter,
    Progress,
    ProgressCallback,
    Recipe,
    Skipped,
    SplitRecord,
    Tokenizer,
    existing,
    finished,
    in_batches,
    no_documents,
    write_splits,
    written,
)
from drumline.encoding.ahead import encoded_ahead
from drumline.encoding.fast import FastTokenizer
from drumline.encoding.joining import joined
from drumline.encoding.journal import Journal
from drumline.encoding.kept import Kept
from drumline.encoding.learning import train
from drumline.encoding.sampling import READ_BYTES, SAMPLE_BYTES, sampled
from drumline.encoding.stretches import Stretch, Stretches, in_stretches
from drumline.encoding.workers import working
from drumline.errors import DataError
from drumline.files import Lock

PART_BYTES = 128 << 20
"""Text of a part, at least: what is encoded again at most, for each process that is killed."""
_WAIT_S = 0.2


def prepared_in_parts(
    recipe: Recipe, out: Path, progress: ProgressCallback, skipped: Skipped, workers: int = 1
) -> tuple[Manifest, int]:
    """Write the tokens to the folder `out`; also gives how much of the text was encoded before.

    workers: processes that encode, this one among them
    """
    while True:
        journal = Journal(out, recipe.key)
        try:
            with journal.open() as started_over:
                # Another process may have finished between the last look and now.
                manifest, before_bytes = existing(out, recipe), 0
                if manifest is None:
                    manifest, before_bytes = _Work(recipe, journal, progress).finished(out, skipped, workers=workers)
                if started_over:
                    skipped.note += "; started over, because the text or the settings have changed since it was begun"
            journal.remove()
            return manifest, before_bytes
        except FileNotFoundError:
            if journal.folder.exists():
                raise


def encode_what_is_left(recipe: Recipe, out: Path) -> None:
    """Help a process that is at work: return when no stretch is left to take."""
    journal = Journal(out, recipe.key)
    try:
        with journal.open():
            _Work(recipe, journal, lambda _: None).encode(helps=True)
    except FileNotFoundError:
        if journal.folder.exists():
            raise


class _Work:
    """What one process does."""

    def __init__(self, recipe: Recipe, journal: Journal, progress: ProgressCallback) -> None:
        self._recipe, self._corpus, self._journal, self._progress = recipe, recipe.corpus, journal, progress
        self._note = ""
        self._kept = Kept(journal.folder)
        stretches, cut_bytes = journal.planned(self._plan)
        self._stretches = self._of(stretches, cut_bytes)
        self._tokenizer = recipe.tokenizer or Tokenizer.load(journal.folder / TOKENIZER)
        self._fast: FastTokenizer | None = None
        if not recipe.fast:
            journal.slow_down("")

    def finished(self, out: Path, skipped: Skipped, *, workers: int) -> tuple[Manifest, int]:
        """Encode what others do not, wait for them, and join the parts unless another process does."""
        before_bytes = sum(part.text_bytes for part in self._parts())
        with working(self._recipe, out, workers - 1) as lost:
            self.encode()
        lock = Lock(self._journal.folder / "join.lock")
        try:
            while not lock.take(wait_s=1.0):
                pass
            manifest = existing(out, self._recipe)
            if manifest is None:
                self._sum_skipped(skipped)
                manifest = written(self._recipe, out, lambda folder: self._join(folder, skipped))
        finally:
            lock.close()
        reason = self._journal.why_slow()
        skipped.note += self._note + lost.note() + (f"; encoded slowly, by tokenizers: {reason}" if reason else "")
        return manifest, before_bytes

    def encode(self, *, helps: bool = False) -> None:
        """Encode stretches until all are. helps: until each of them is encoded, or being encoded by another process"""
        own: set[int] = set()
        before = self._journal.done()
        meter = Meter("encoding", self._shown(own, before), source_bytes=self._corpus.size_bytes())
        while left := sorted(set(range(len(self._stretches.all))) - self._journal.done()):
            took = False
            for number in left:
                with self._journal.claimed(number) as mine:
                    if mine:
                        took = True
                        try:
                            self._encode_stretch(number, meter)
                        except EncoderError as error:
                            self._journal.slow_down(str(error))
                            break
                        own.add(number)
            if not took and helps:
                return
            if not took:
                time.sleep(_WAIT_S)
                meter.report()
        meter.report()  # with what others have done last

    def _of(self, stretches: Sequence[Stretch], cut_bytes: int | None) -> Stretches:
        folder = self._journal.folder
        return Stretches(self._corpus, stretches, cut_bytes=cut_bytes, notes=folder, kept=self._kept)

    def _plan(self) -> tuple[list[Stretch], int | None]:
        """Decide how the text is split, and train the tokenizer."""
        with self._kept.keeping():
            sample, cut_bytes = self._read_first()
        if self._recipe.tokenizer is None:
            size, folder = self._recipe.vocab_size, self._journal.folder
            tokenizer, self._note = train(sample, vocab_size=size, folder=folder, progress=self._progress)
            tokenizer.save(folder / TOKENIZER)
        return in_stretches(self._corpus, cut_bytes=cut_bytes), cut_bytes

    def _read_first(self) -> tuple[list[str], int | None]:
        """A sample of the text for a tokenizer, and where the text is split if no document is held out."""
        corpus, cut_bytes = self._corpus, None
        trains, is_text = self._recipe.tokenizer is None, type(self._corpus) is Corpus
        sample, has_held_out = self._sample(None) if trains and is_text else ([], False)
        if not has_held_out:
            sample_bytes = SAMPLE_BYTES if trains and not is_text else 0
            meter = Meter("reading", self._progress, source_bytes=corpus.size_bytes(), text_limit=sample_bytes)
            reading = replace(corpus.reading(meter.on_bytes), unpack=self._kept.unpack)
            first, cut_bytes = corpus.survey(reading, sample_bytes=sample_bytes, on_text=meter.on_text)
            sample = sample or first
        if trains and is_text and cut_bytes is not None:
            sample, _ = self._sample(cut_bytes)
        return sample, cut_bytes

    def _sample(self, cut_bytes: int | None) -> tuple[list[str], bool]:
        size_bytes = self._corpus.size_bytes()
        meter = Meter("reading", self._progress, source_bytes=size_bytes and min(size_bytes, READ_BYTES))
        stretches = self._of(in_stretches(self._corpus, cut_bytes=cut_bytes), cut_bytes)
        return sampled(stretches, meter, sample_bytes=SAMPLE_BYTES)

    def _shown(self, own: set[int], before: set[int]) -> ProgressCallback:
        """The progress of all processes, as far as they have told it."""
        sizes = [each.size_bytes for each in self._stretches.all]
        before_bytes = sum(sizes[number] for number in before)

        def show(progress: Progress) -> None:
            others_bytes = sum(sizes[number] for number in self._journal.done() - own)
            done_bytes = progress.bytes_done + others_bytes
            self._progress(replace(progress, bytes_done=done_bytes, bytes_before=before_bytes))

        return show

    def _encoder(self) -> Callable[[Sequence[str]], Sequence[Any]]:
        if self._journal.is_slow:
            return self._recipe.encoder(self._tokenizer)
        if self._fast is None:
            self._fast = FastTokenizer(self._tokenizer)
        return self._fast.encode_batch

    def _encode_stretch(self, number: int, meter: Meter) -> None:
        encode, skipped = self._encoder(), Skipped()
        items = sum(part.items for part in self._journal.parts(number))
        text = islice(self._stretches.read(number, self._corpus.reading(meter.on_bytes, skipped)), items, None)
        with closing(encoded_ahead(in_batches(text, meter), encode)) as encoded:
            source = _Counted(encoded)
            while not source.ended:
                self._journal.add_part(number, lambda folder: self._write(folder, source, meter))
        self._journal.finish(number, skipped)

    def _write(self, folder: Path, source: _Counted, meter: Meter) -> tuple[int, dict[str, SplitRecord]]:
        encoded = source.until(PART_BYTES)
        splits, _ = write_splits(folder, self._recipe, self._tokenizer, encoded, meter)
        return source.items, splits

    def _parts(self) -> Iterator[Any]:
        for number in range(len(self._stretches.all)):
            yield from self._journal.parts(number)

    def _sum_skipped(self, skipped: Skipped) -> None:
        for number in range(len(self._stretches.all)):
            one = self._journal.skipped(number)
            for reason in one.first:
                skipped.add(reason)
            skipped.count += one.count - len(one.first)
            skipped.note += one.note

    def _check_documents(self, skipped: Skipped) -> None:
        counts = {each.held_out: 0 for each in self._stretches.all}
        for number, stretch in enumerate(self._stretches.all):
            for part in self._journal.parts(number):
                counts[stretch.held_out] += part.items
        for held_out, items in counts.items():
            if not items:
                source, _ = (self._corpus.valid_split if held_out else None) or (self._corpus.source, "")
                raise no_documents(source, skipped)

    def _join(self, folder: Path, skipped: Skipped) -> Manifest:
        self._kept.remove()
        recipe, tokenizer, corpus = self._recipe, self._tokenizer, self._corpus
        parts = list(self._parts())
        self._check_documents(skipped)
        splits, paths = joined(parts, folder, vocab_size=tokenizer.vocab_size, progress=self._progress)
        again = replace(recipe)
        if again.key != recipe.key:
            raise DataError(f"{corpus.source} changed while it was prepared", fix="run the same command again")
        return finished(folder, recipe, tokenizer, splits, paths)


class _Counted:
    """Encoded batches, taken by one part after the other."""

    def __init__(self, encoded: Iterator[tuple[Batch, Sequence[Any]]]) -> None:
        self._encoded = encoded
        self.items = 0
        self.ended = False

    def until(self, most_bytes: int) -> Iterator[tuple[Batch, Sequence[Any]]]:
        """Batches of about as much text."""
        self.items = text_bytes = 0
        for batch, ids in self._encoded:
            self.items += len(batch.documents)
            text_bytes += batch.text_bytes
            yield batch, ids
            if text_bytes >= most_bytes:
                return
        self.ended = True
