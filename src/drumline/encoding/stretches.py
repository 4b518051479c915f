"""A corpus in stretches: consecutive documents that one process encodes, whichever takes them first.

A stretch is a range of a file of lines, a few whole files, or, where documents can only be had from the beginning (a
compressed file, a function, a dataset of the Hub), all of that. One after the other, they are the documents of the
corpus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from drumline.data import Corpus, Document, Labelled, Reading, documents, read_file, read_lines, source_files
from drumline.encoding.kept import Kept
from drumline.files import replace_text

STRETCH_BYTES = 64 << 20
"""Of files, as they are on disk."""
LINE_SUFFIXES = (".jsonl", ".ndjson")
_COUNTED_BYTES = 1 << 20


@dataclass(frozen=True)
class Stretch:
    """Which documents of a corpus."""

    held_out: bool
    """Of separate validation text; otherwise of the training text."""
    files: tuple[int, int] | None = None
    """The first file, and the one after the last; None: all documents of the source, from the beginning."""
    place: tuple[int, int] | None = None
    """The range of bytes, if it is part of a file: the lines that begin there."""
    size_bytes: int = 0


def in_stretches(corpus: Corpus, *, cut_bytes: int | None) -> list[Stretch]:
    """All of a corpus, training text first. cut_bytes: from `Corpus.survey`"""
    if cut_bytes is not None or type(corpus) is not Corpus:  # only all of the text, in order, says what is held out
        return [Stretch(False, size_bytes=corpus.size_bytes() or 0)]
    stretches: list[Stretch] = []
    for held_out in (False, True) if corpus.valid_split else (False,):
        paths = _files(corpus, held_out=held_out)
        stretches += [Stretch(held_out)] if paths is None else _of_files(paths, held_out=held_out)
    return stretches


def _of_files(paths: Sequence[Path], *, held_out: bool) -> Iterator[Stretch]:
    first = size_bytes = 0
    for number, path in enumerate(paths):
        try:
            own_bytes = path.stat().st_size
        except OSError:  # reading it will say so
            own_bytes = 0
        if size_bytes and size_bytes + own_bytes > STRETCH_BYTES:
            yield Stretch(held_out, (first, number), None, size_bytes)
            first, size_bytes = number, 0
        if own_bytes > STRETCH_BYTES and path.suffix.lower() in LINE_SUFFIXES:
            if first < number:  # empty files
                yield Stretch(held_out, (first, number))
            for start in range(0, own_bytes, STRETCH_BYTES):
                place = start, min(start + STRETCH_BYTES, own_bytes)
                yield Stretch(held_out, (number, number + 1), place, place[1] - start)
            first, size_bytes = number + 1, 0
        else:
            size_bytes += own_bytes
    if first < len(paths):
        yield Stretch(held_out, (first, len(paths)), None, size_bytes)


class Stretches:
    """The stretches of a corpus, to be read."""

    def __init__(
        self,
        corpus: Corpus,
        stretches: Sequence[Stretch],
        *,
        cut_bytes: int | None,
        notes: Path,
        kept: Kept | None = None,
    ) -> None:
        """notes: a folder for what is learned about files, shared by all who read them; kept: what is in it"""
        self.corpus, self.all, self.cut_bytes, self._notes = corpus, stretches, cut_bytes, notes
        self._kept = kept or Kept(notes)
        self._files = {each.held_out: _files(corpus, held_out=each.held_out) or () for each in stretches if each.files}

    def read(self, number: int, reading: Reading) -> Iterator[Labelled]:
        """The documents of a stretch with their labels, long ones in parts."""
        stretch, corpus, reading = self.all[number], self.corpus, replace(reading, unpack=self._kept.unpack)
        if stretch.files is None and not stretch.held_out and all(not each.held_out for each in self.all):
            return corpus.labelled(reading, cut_bytes=self.cut_bytes)
        whole = self._documents(number, reading)
        if stretch.held_out:
            return corpus.label(whole, cut_bytes=0)
        return corpus.label(whole, cut_bytes=None, index=number)  # the first document of all is never held out

    def _documents(self, number: int, reading: Reading) -> Iterator[Document]:
        stretch, corpus = self.all[number], self.corpus
        if stretch.files is None:
            source, split = (corpus.valid_split if stretch.held_out else None) or (corpus.source, "train")
            return documents(source, reading, split=split)
        own = self._files[stretch.held_out][slice(*stretch.files)]
        if stretch.place is not None:
            return read_lines(own[0], reading=reading, place=stretch.place, before=self._lines_before(number))
        return chain.from_iterable(read_file(path, name=path.as_posix(), reading=reading) for path in own)

    def _lines_before(self, number: int) -> int:
        """How many lines of the file begin before a stretch of it. Each is counted once, by whoever is first."""
        lines, stretch = 0, self.all[number]
        while stretch.place is not None and stretch.place[0] > 0:
            number -= 1
            stretch = self.all[number]
            note = self._notes / f"{number}.lines"
            if not note.exists():
                assert stretch.files is not None and stretch.place is not None
                path = self._files[stretch.held_out][stretch.files[0]]
                replace_text(note, str(_count_lines(path, stretch.place)))
            lines += int(note.read_text())
        return lines


def _count_lines(path: Path, place: tuple[int, int]) -> int:
    """How many lines begin in a range of a file."""
    start, stop = place
    lines = 1 if start == 0 else 0
    with path.open("rb", buffering=0) as file:
        file.seek(position := max(0, start - 1))
        while position < stop - 1 and (block := file.read(min(_COUNTED_BYTES, stop - 1 - position))):
            lines += block.count(b"\n")
            position += len(block)
    return lines


def _files(corpus: Corpus, *, held_out: bool) -> Sequence[Path] | None:
    source, split = (corpus.valid_split if held_out else None) or (corpus.source, "train")
    return source_files(source, split)
