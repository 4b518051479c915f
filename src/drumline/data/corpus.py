"""A source's documents, split into training and validation data. Independent of tokens.

Validation data is, in this order: another source, if given; the source's own validation split; some of its documents,
chosen by their names; or, if that would select none, the end of the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from drumline.config import OnError
from drumline.data.sources import Document, Reading, Skipped, documents, has_split, source_bytes, source_key
from drumline.errors import ConfigError

LONGEST_DOCUMENT_BYTES = 1 << 20
"""Longer documents are encoded in parts, like plain files."""

Label = Literal["train", "valid"]
Labelled = tuple[Label, Document]


@dataclass(frozen=True)
class Corpus:
    """Training text, and how validation text is chosen."""

    source: str
    field: str = "text"
    on_error: OnError = "stop"
    valid_source: str | None = None
    """Validation text. Default: the source's own validation split, else `valid_fraction` of the documents."""
    valid_fraction: float = 0.02
    """Chosen by `seed` and the documents' names; if that would select none, the end of the text."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.valid_fraction < 1.0:
            raise ConfigError(f"valid_fraction {self.valid_fraction} is not in [0, 1)", fix="use --valid_fraction 0.02")

    @cached_property
    def valid_split(self) -> tuple[str, str] | None:
        """Source and split of separate validation data."""
        if self.valid_source is not None:
            return self.valid_source, "validation" if has_split(self.valid_source, "validation") else "train"
        return (self.source, "validation") if has_split(self.source, "validation") else None

    @property
    def holds_out_documents(self) -> bool:
        """Whether some of the source's training text is held out for validation."""
        return self.valid_split is None and self.valid_fraction > 0

    @property
    def labels(self) -> tuple[Label, ...]:
        return ("train", "valid") if self.valid_split or self.holds_out_documents else ("train",)

    def key(self) -> list[str | float]:
        """Everything that determines the documents and their labels."""
        valid: list[str | float] = [self.valid_fraction, self.seed]
        if self.valid_split:
            valid = [source_key(self.valid_split[0]), self.valid_split[1]]
        return [source_key(self.source), self.field, self.on_error, *valid]

    def size_bytes(self) -> int | None:
        """Bytes to read from disk; None if unknown."""
        train = source_bytes(self.source)
        valid = source_bytes(*self.valid_split) if self.valid_split else 0
        return None if train is None or valid is None else train + valid

    def reading(self, on_bytes: Callable[[int], None], skipped: Skipped | None = None) -> Reading:
        """on_bytes: called with the number of bytes newly read from disk."""
        return Reading(field=self.field, on_error=self.on_error, skipped=skipped or Skipped(), on_bytes=on_bytes)

    def survey(
        self, reading: Reading, *, sample_bytes: int, on_text: Callable[[int], None]
    ) -> tuple[list[str], int | None]:
        """The first `sample_bytes` of the training text, and where to split the text if no document is held out.

        Reads no further than necessary: until the sample is complete and one held-out document was seen.
        on_text: called with each document's size.
        """
        sample: list[Document] = []
        index = sampled_bytes = total_bytes = 0
        needs_cut = self.holds_out_documents
        for document in documents(self.source, reading) if sample_bytes or needs_cut else ():
            size_bytes = utf8_bytes(document.text)
            total_bytes += size_bytes
            on_text(size_bytes)
            if self.is_held_out(index, document):
                needs_cut = False
            elif sampled_bytes < sample_bytes:
                sample.append(document)
                sampled_bytes += size_bytes
            index += not document.more
            if not needs_cut and sampled_bytes >= sample_bytes:
                break
        if not needs_cut:
            return [document.text for document in sample], None
        from drumline.data.cutting import split_at

        cut_bytes = total_bytes - max(1, round(total_bytes * self.valid_fraction))
        return [part.text for label, part in split_at(sample, cut_bytes) if label == "train"], cut_bytes

    def labelled(self, reading: Reading, *, cut_bytes: int | None) -> Iterator[Labelled]:
        """Every document with its label, in parts of at most LONGEST_DOCUMENT_BYTES. cut_bytes: from `survey`."""
        yield from self.label(documents(self.source, reading), cut_bytes=cut_bytes, skipped=reading.skipped)
        if self.valid_split:
            source, split = self.valid_split
            yield from self.label(documents(source, reading, split=split), cut_bytes=0)

    def label(
        self, whole: Iterable[Document], *, cut_bytes: int | None, index: int = 0, skipped: Skipped | None = None
    ) -> Iterator[Labelled]:
        """The same, of some documents. cut_bytes: where the held-out text begins. index: that of the first of them"""
        labelled = self._by_name(whole, index)
        if cut_bytes is not None:
            from drumline.data.cutting import split_at

            labelled = split_at(whole, cut_bytes, skipped)
        for label, document in labelled:
            if utf8_bytes(document.text) <= LONGEST_DOCUMENT_BYTES:
                yield label, document
                continue
            from drumline.data.cutting import parts

            yield from ((label, part) for part in parts(document, longest_bytes=LONGEST_DOCUMENT_BYTES))

    def _by_name(self, whole: Iterable[Document], index: int) -> Iterator[Labelled]:
        for document in whole:
            yield ("valid" if self.is_held_out(index, document) else "train"), document
            index += not document.more

    def is_held_out(self, index: int, document: Document) -> bool:
        """Determined by seed and name alone, but the first one is never held out: something must remain to train on."""
        if not self.holds_out_documents or index == 0:
            return False
        # By its name within the source: the source's location, and how its path is written, must not matter.
        within = document.name.removeprefix(self.source).lstrip("/")
        name = f"{self.seed}\0{within}".encode(errors="backslashreplace")
        draw = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
        return draw < self.valid_fraction * 2**64


def utf8_bytes(text: str) -> int:
    """Length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())
