"""One file of text, JSON lines or parquet, plain or packed with gzip, xz or zstd, becomes documents.

Knows suffixes, how each kind is read as a stream (memory stays small whatever the size) and what can be wrong inside a
file. Does not know where files come from: `drumline.data.sources` does.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from drumline.config import OnError
from drumline.errors import DataError, MissingExtraError

PART_BYTES = 1 << 20
"""A plain text file longer than this is cut at a line's end into documents of about this size."""
LONGEST_LINE_BYTES = 4 << 20
"""A line longer than this is cut inside, between two characters."""
LARGEST_ARRAY_BYTES = 64 << 20
"""A JSON array must be parsed whole; longer ones are refused."""
PARQUET_BATCH_ROWS = 64
"""Rows can be whole books: few at a time."""

PACKINGS = (".gz", ".xz", ".zst")
ROW_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
TEXT_SUFFIXES = frozenset(
    """
    .txt .text .md .markdown .rst .adoc .org .tex .bib .html .htm .xml .css .scss .csv .tsv .srt
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .hxx .cu .cuh .cl .rs .go .zig .nim .d .s .asm .f .f90 .f95
    .java .kt .kts .scala .groovy .clj .cs .fs .vb .swift .m .mm .dart .js .mjs .jsx .ts .tsx .vue .php .rb
    .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .elm .lisp .el .scm .rkt .lean .agda .pas .ada .tcl
    .sh .bash .zsh .fish .ps1 .bat .sql .graphql .proto .cmake .mk .yaml .yml .toml .ini .cfg .conf .vim .awk
    """.split()  # a hundred quoted lines read worse
)
"""What a folder's files must end with to be read as plain text; a file named by itself may end as it likes."""

_MEND = "mend the file, or pass over what is damaged with --on_error skip"
_FETCH_AGAIN = "make or download the file again, or pass over it with --on_error skip"
_REMOVE = "remove the file, or pass over empty files with --on_error skip"
_FIRST_REASONS = 5


@dataclass(frozen=True)
class Document:
    """A text that stands on its own, and where it came from, for people."""

    name: str
    """Such as corpus/a.txt, x.jsonl:17 (the line), part.parquet:row 5 or book.txt#3 (the third part)."""
    text: str


@dataclass
class Skipped:
    """What was passed over because it could not be read."""

    count: int = 0
    first: list[str] = dataclasses.field(default_factory=list)
    """The first few reasons; each names the file and the place in it."""

    def add(self, reason: str) -> None:
        self.count += 1
        if len(self.first) < _FIRST_REASONS:
            self.first.append(reason)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read: which field, what to do about damage, whom to tell about progress."""

    field: str = "text"
    on_error: OnError = "stop"
    skipped: Skipped = dataclasses.field(default_factory=Skipped)
    on_bytes: Callable[[int], None] = lambda _: None
    """Called with the number of bytes newly consumed on disk."""

    def bad(self, problem: str, *, fix: str) -> None:
        """Something is wrong: stop here, or count it and return so that the reader goes on behind it."""
        if self.on_error == "skip":
            self.skipped.add(problem)
        else:
            raise DataError(problem, fix=fix)


def is_text_file(path: Path) -> bool:
    """Whether a folder's file is taken for text, by its name."""
    kind, _ = _suffixes(path)
    return kind in TEXT_SUFFIXES or kind in ROW_SUFFIXES


def read_file(path: Path, *, name: str, reading: Reading) -> Iterator[Document]:
    """The documents of one file, in order. `name` is what people are told; `on_bytes` adds up to the file's size."""
    kind, packing = _suffixes(path)
    consumed_bytes = size_bytes = 0

    def count(new_bytes: int) -> None:
        nonlocal consumed_bytes
        consumed_bytes += new_bytes
        reading.on_bytes(new_bytes)

    try:
        size_bytes = path.stat().st_size
        if kind == ".parquet" and not packing:
            yield from _read_parquet(path, name=name, reading=reading, size_bytes=size_bytes, count=count)
        else:
            with closing(_open(path, packing, count)) as stream:
                if kind == ".parquet":
                    yield from _read_packed_parquet(stream, name=name, reading=reading)
                elif kind in ROW_SUFFIXES:
                    yield from _read_json(stream, name=name, reading=reading, may_be_array=kind == ".json")
                else:
                    yield from _read_plain(stream, name=name, reading=reading)
    except OSError as error:
        reading.bad(f"{name} cannot be read: {error.strerror or error}", fix=_FETCH_AGAIN)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        reading.bad(f"{name} is damaged or cut short: {error}", fix=_FETCH_AGAIN)
    if consumed_bytes < size_bytes:  # a reader may leave a rest unread: trailing columns, or all behind the damage
        reading.on_bytes(size_bytes - consumed_bytes)


def string_value(value: object, *, where: str, reading: Reading) -> str:
    """`value` if it is text; otherwise, when errors are passed over, the empty string."""
    if not isinstance(value, str):
        shown = "null" if value is None else f"of type {type(value).__name__}"
        reading.bad(
            f"{where}: field {reading.field!r} is {shown}, not a string",
            fix="choose a field of strings with --field NAME, or pass over such rows with --on_error skip",
        )
        return ""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reading.bad(
            f"{where}: character {error.start} is half of a surrogate pair (U+{ord(value[error.start]):04X}), not text",
            fix=_MEND,
        )
        return ""
    return value


def missing_field(where: str, *, present: list[str], field: str) -> tuple[str, str]:
    """Problem and fix for rows that lack the field they are to be read from."""
    listed = ", ".join(present[:12]) + (", ..." if len(present) > 12 else "")
    return (
        f"{where} has no field {field!r}; it has: {listed or 'none'}",
        f"choose the field with --field {present[0] if len(present) == 1 else 'NAME'}, "
        "or pass over what lacks it with --on_error skip",
    )


def _suffixes(path: Path) -> tuple[str, str]:
    """The kind and the packing of a file: ("a/x.JSONL.gz") -> (".jsonl", ".gz")."""
    packing = path.suffix.lower()
    if packing in PACKINGS:
        return path.with_suffix("").suffix.lower(), packing
    return packing, ""


class _CountedFile(io.FileIO):
    """A file that tells how many bytes were read from it."""

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(path)
        self._count = count

    def readinto(self, buffer: bytearray | memoryview) -> int | None:  # type: ignore[override]  # fewer kinds of buffer
        read_bytes = super().readinto(buffer)
        self._count(read_bytes or 0)
        return read_bytes


class _ZstdFile(io.RawIOBase):
    """Unpacks zstd frames, and unlike the package's own reader notices that the last one is cut short."""

    # A run of equal blocks packs 128 KiB into a dozen bytes: little input at a time keeps the output small.
    _INPUT_BYTES = 256

    def __init__(self, packed: BinaryIO) -> None:
        import zstandard  # compiled, and needed for nothing else: a machine without it reads all other files

        self._zstd = zstandard
        self._packed = packed
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside_frame = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # fewer kinds of buffer
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            packed = packed or self._packed.read(self._INPUT_BYTES)
            if not packed:
                if self._inside_frame:
                    raise EOFError("the last zstd frame does not end")
                return 0
            if self._frame.eof:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._zstd.ZstdError as error:
                raise EOFError(str(error)) from None
            self._inside_frame = not self._frame.eof
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)


class _Unpacked(io.BufferedReader):
    """The unpacked bytes; closing it closes the file below too, which GzipFile and LZMAFile leave open."""

    def __init__(self, unpacked: io.RawIOBase, packed: BinaryIO) -> None:
        super().__init__(unpacked, 1 << 17)
        self._packed_file = packed

    def close(self) -> None:
        super().close()
        self._packed_file.close()


def _open(path: Path, packing: str, count: Callable[[int], None]) -> io.BufferedReader:
    """The file's unpacked bytes as a stream."""
    file: io.BufferedReader = io.BufferedReader(_CountedFile(path, count), 1 << 17)
    if packing == ".gz":
        return _Unpacked(cast(io.RawIOBase, gzip.GzipFile(fileobj=file, mode="rb")), file)
    if packing == ".xz":
        return _Unpacked(cast(io.RawIOBase, lzma.LZMAFile(file)), file)
    if packing == ".zst":
        return _Unpacked(_ZstdFile(file), file)
    return file


def _read_plain(stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[Document]:
    line, offset = 1, 0
    for number, part in _cut(stream):
        text = _decoded(part, name=name, line=line, offset=offset, reading=reading)
        if text is not None and (number or text.strip()):
            yield Document(f"{name}#{number}" if number else name, text)
        elif text is not None:
            reading.bad(f"{name} is empty" + (" but for white space" if text else ""), fix=_REMOVE)
        line += part.count(b"\n")
        offset += len(part)


def _cut(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Parts that end at a line's end, numbered from 1; a stream that needs no cut is one part numbered 0."""
    number, held = 0, b""
    while block := stream.read(PART_BYTES):
        held += block
        while len(held) > PART_BYTES:
            cut = held.rfind(b"\n", 0, PART_BYTES) + 1 or held.find(b"\n", PART_BYTES, LONGEST_LINE_BYTES) + 1
            if not cut and len(held) > LONGEST_LINE_BYTES:
                cut = LONGEST_LINE_BYTES
                while cut > LONGEST_LINE_BYTES - 3 and held[cut] & 0xC0 == 0x80:  # inside a character
                    cut -= 1
            if cut in (0, len(held)):  # no line ends here yet, or perhaps nothing follows
                break
            number += 1
            yield number, held[:cut]
            held = held[cut:]
    if held or not number:
        yield (number + 1 if number else 0), held


def _decoded(data: bytes, *, name: str, line: int, offset: int, reading: Reading) -> str | None:
    """`data` as text. `line` and `offset` say where in the file it begins."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        bad_line = line + data.count(b"\n", 0, error.start)
        reading.bad(
            f"{name}:{bad_line}: byte {offset + error.start} of the file (0x{data[error.start]:02x}) is not UTF-8",
            fix="convert the file (iconv -f ITS_ENCODING -t UTF-8), or pass over bad text with --on_error skip",
        )
        return None


def _read_json(stream: io.BufferedReader, *, name: str, reading: Reading, may_be_array: bool) -> Iterator[Document]:
    if may_be_array and stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        rows = _array_rows(stream, name=name, reading=reading)
    else:
        rows = _line_rows(stream, name=name, reading=reading)
    for where, row in rows:
        if not isinstance(row, dict):
            reading.bad(f"{where} is {json.dumps(row)[:40]}, not an object with fields", fix=_MEND)
        elif reading.field not in row:
            problem, fix = missing_field(where, present=list(row), field=reading.field)
            reading.bad(problem, fix=fix)
        elif text := string_value(row[reading.field], where=where, reading=reading):
            yield Document(where, text)


def _line_rows(stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[tuple[str, object]]:
    offset, blank = 0, True
    for number, line in enumerate(stream, start=1):
        if line.strip():
            blank = False
            text = _decoded(line, name=name, line=number, offset=offset, reading=reading)
            try:
                if text is not None:
                    yield f"{name}:{number}", json.loads(text.removeprefix("\ufeff").rstrip())
            except (ValueError, RecursionError) as error:
                reading.bad(f"{name}:{number} is not valid JSON: {error}", fix=f"write one object per line; {_MEND}")
        offset += len(line)
    if blank:
        reading.bad(f"{name} is empty", fix=_REMOVE)


def _array_rows(stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[tuple[str, object]]:
    data = stream.read(LARGEST_ARRAY_BYTES + 1)
    if len(data) > LARGEST_ARRAY_BYTES:
        reading.bad(
            f"{name} is one JSON array of more than {LARGEST_ARRAY_BYTES >> 20} MiB",
            fix=f"write it as JSON lines: jq -c '.[]' {name} > lines.jsonl",
        )
        return
    text = _decoded(data.removeprefix(codecs.BOM_UTF8), name=name, line=1, offset=0, reading=reading)
    try:
        rows = json.loads(text) if text is not None else []
    except (ValueError, RecursionError) as error:
        reading.bad(f"{name} is not valid JSON: {error}", fix=_MEND)
        return
    for number, row in enumerate(rows, start=1):
        yield f"{name}:item {number}", row


def _read_packed_parquet(stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[Document]:
    with tempfile.TemporaryFile() as unpacked:  # parquet is read from its end: it needs a file to seek in
        shutil.copyfileobj(stream, unpacked)
        yield from _read_parquet(unpacked, name=name, reading=reading, size_bytes=0, count=lambda _: None)


def _read_parquet(
    source: Path | BinaryIO, *, name: str, reading: Reading, size_bytes: int, count: Callable[[int], None]
) -> Iterator[Document]:
    """One document per row. Progress is told by rows: `count` gets the row's share of the file's size."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("reading parquet files", extra="datasets") from error
    row = told_bytes = 0
    try:
        with pq.ParquetFile(source, buffer_size=PART_BYTES) as file:
            if reading.field not in file.schema_arrow.names:
                problem, fix = missing_field(name, present=file.schema_arrow.names, field=reading.field)
                reading.bad(problem, fix=fix)
                return
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[reading.field]):
                for value in batch.column(0):
                    row += 1
                    where = f"{name}:row {row}"
                    try:
                        text = string_value(value.as_py(), where=where, reading=reading)
                    except UnicodeDecodeError:
                        reading.bad(f"{where} is not UTF-8", fix=_MEND)
                        continue
                    if text:
                        yield Document(where, text)
                done_bytes = size_bytes * row // max(1, file.metadata.num_rows)
                count(done_bytes - told_bytes)
                told_bytes = done_bytes
    except pa.ArrowException as error:
        reading.bad(f"{name} is a damaged parquet file (behind row {row}): {error}", fix=_FETCH_AGAIN)
