"""JSON and parquet rows, and files compressed with gzip, xz or zstd, become documents.

As in `drumline.data.sources`, everything is streamed, and errors name the place in the file.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from drumline.data.sources import (
    COMPRESSED_SUFFIXES,
    MAKE_AGAIN,
    PART_BYTES,
    REMOVE_EMPTY,
    STRUCTURED_SUFFIXES,
    Document,
    Reading,
    decoded,
    read_plain,
)
from drumline.errors import MissingExtraError
from drumline.lazy import room

LARGEST_ARRAY_BYTES = 64 << 20
"""A JSON array must be parsed as a whole; longer ones are rejected."""
PARQUET_BATCH_ROWS = 64
"""Rows can be whole books: read few at a time."""

_MEND = "repair the file, or skip damaged rows with --on_error skip"


def read_structured(stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[Document]:
    """The documents of a file that has rows, is compressed, or both, according to its suffixes."""
    kind, compression = file_kind(Path(name))
    content = _decompressed(stream, compression, reading)
    try:
        if kind == ".parquet":
            yield from _read_parquet(content, name=name, reading=reading, seekable=not compression)
        elif kind in STRUCTURED_SUFFIXES:
            yield from _read_json(content, name=name, reading=reading, may_be_array=kind == ".json")
        else:
            yield from read_plain(content, name=name, reading=reading)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        reading.bad(f"{name} is damaged or truncated: {error}", fix=MAKE_AGAIN)
    finally:
        if compression:
            content.close()  # with the threads that unpack it


def file_kind(path: Path) -> tuple[str, str]:
    """The suffixes for format and compression: a/x.JSONL.gz -> (".jsonl", ".gz")."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED_SUFFIXES:
        return path.with_suffix("").suffix.lower(), suffix
    return suffix, ""


def string_value(value: object, *, where: str, reading: Reading) -> str:
    """`value` if it is text; otherwise the empty string if errors are skipped. Messages become JSON."""
    if reading.format == "chat":
        return json.dumps(value, default=repr)  # checked by drumline.chats
    if not isinstance(value, str):
        shown = "null" if value is None else f"of type {type(value).__name__}"
        reading.bad(
            f"{where}: field {reading.field!r} is {shown}, not a string",
            fix="choose a field of strings with --field NAME, or skip such rows with --on_error skip",
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
    """Problem and fix for rows without the requested field."""
    listed = ", ".join(present[:12]) + (", ..." if len(present) > 12 else "")
    return (
        f"{where} has no field {field!r}; it has: {listed or 'none'}",
        f"choose the field with --field {present[0] if len(present) == 1 else 'NAME'}, "
        "or skip rows without it with --on_error skip",
    )


class _ZstdFile(io.RawIOBase):
    """Decompresses zstd frames, and unlike the package's own reader detects a truncated last frame."""

    # A run of equal blocks compresses 128 KiB to a dozen bytes: small inputs keep the output small.
    _INPUT_BYTES = 256

    def __init__(self, compressed: BinaryIO) -> None:
        import zstandard  # a compiled extension, needed only here: all other files can be read without it

        self._zstd = zstandard
        self._compressed = compressed
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside_frame = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # fewer kinds of buffer
        while not self._ready:
            compressed = self._frame.unused_data if self._frame.eof else b""
            compressed = compressed or self._compressed.read(self._INPUT_BYTES)
            if not compressed:
                if self._inside_frame:
                    raise EOFError("the last zstd frame is truncated")
                return 0
            if self._frame.eof:
                self._frame = self._zstd.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(compressed))
            except self._zstd.ZstdError as error:
                raise EOFError(str(error)) from None
            self._inside_frame = not self._frame.eof
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)


_UNPACK: dict[str, Callable[[BinaryIO], io.RawIOBase]] = {
    ".gz": lambda file: cast(io.RawIOBase, gzip.GzipFile(fileobj=file, mode="rb")),
    ".xz": lambda file: cast(io.RawIOBase, lzma.LZMAFile(file)),  # noqa: SIM115
    ".zst": _ZstdFile,
}
"""Unpacking from the beginning; the file below is closed by who opened it."""


def _decompressed(file: BinaryIO, compression: str, reading: Reading) -> io.BufferedReader:
    if not compression:
        return cast(io.BufferedReader, file)
    unpack = reading.unpack or room("encoding").unpacked_ahead
    return io.BufferedReader(unpack(file, compression, _UNPACK[compression]), 1 << 17)


def read_lines(path: Path, *, reading: Reading, place: tuple[int, int], before: int) -> Iterator[Document]:
    """The documents of some lines of a file, those that begin in a range of bytes.

    before: how many lines there are before
    """
    start, stop = place
    done, name = start, path.as_posix()
    try:
        with open(path, "rb", buffering=1 << 17) as file:
            file.seek(max(0, start - 1))
            first = file.tell() + (len(file.readline()) if start else 0)  # a line that begins before belongs there
            lines = _until(file, first, stop)
            for document in _documents(_line_rows(lines, name=name, reading=reading, at=(before, first)), reading):
                position = min(file.tell(), stop)
                reading.on_bytes(position - done)
                done = position
                yield document
    except OSError as error:
        reading.bad(f"{name} cannot be read: {error.strerror or error}", fix=MAKE_AGAIN)
    reading.on_bytes(stop - done)


def _until(file: BinaryIO, position: int, stop: int) -> Iterator[bytes]:
    """The lines that begin before a position."""
    while position < stop and (line := file.readline()):
        position += len(line)
        yield line


def _read_json(stream: io.BufferedReader, *, name: str, reading: Reading, may_be_array: bool) -> Iterator[Document]:
    if may_be_array and stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return _documents(_array_rows(stream, name=name, reading=reading), reading)
    return _documents(_line_rows(stream, name=name, reading=reading), reading)


def _documents(rows: Iterable[tuple[str, object]], reading: Reading) -> Iterator[Document]:
    for where, row in rows:
        if not isinstance(row, dict):
            reading.bad(f"{where} is {json.dumps(row)[:40]}, not an object with fields", fix=_MEND)
        elif reading.field not in row:
            problem, fix = missing_field(where, present=list(row), field=reading.field)
            reading.bad(problem, fix=fix)
        elif text := string_value(row[reading.field], where=where, reading=reading):
            yield Document(where, text)


def _line_rows(
    lines: Iterable[bytes], *, name: str, reading: Reading, at: tuple[int, int] | None = None
) -> Iterator[tuple[str, object]]:
    """at: lines and bytes before the first one, if these are not all of a file"""
    before, offset = at or (0, 0)
    blank = at is None
    for number, line in enumerate(lines, start=before + 1):
        if line.strip():
            blank = False
            text = decoded(line, name=name, line=number, offset=offset, reading=reading)
            try:
                if text is not None:
                    yield f"{name}:{number}", json.loads(text.removeprefix("\ufeff").rstrip())
            except (ValueError, RecursionError) as error:
                reading.bad(f"{name}:{number} is not valid JSON: {error}", fix=f"write one object per line; {_MEND}")
        offset += len(line)
    if blank:
        reading.bad(f"{name} is empty", fix=REMOVE_EMPTY)


def _array_rows(stream: BinaryIO, *, name: str, reading: Reading) -> Iterator[tuple[str, object]]:
    data = stream.read(LARGEST_ARRAY_BYTES + 1)
    if len(data) > LARGEST_ARRAY_BYTES:
        reading.bad(
            f"{name} is one JSON array of more than {LARGEST_ARRAY_BYTES >> 20} MiB",
            fix=f"write it as JSON lines: jq -c '.[]' {name} > lines.jsonl",
        )
        return
    text = decoded(data.removeprefix(codecs.BOM_UTF8), name=name, line=1, offset=0, reading=reading)
    try:
        rows = json.loads(text) if text is not None else []
    except (ValueError, RecursionError) as error:
        reading.bad(f"{name} is not valid JSON: {error}", fix=_MEND)
        return
    for number, row in enumerate(rows, start=1):
        yield f"{name}:item {number}", row


def _read_parquet(stream: BinaryIO, *, name: str, reading: Reading, seekable: bool) -> Iterator[Document]:
    """One document per row."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingExtraError("reading parquet files", extra="datasets") from error
    row = 0
    with tempfile.TemporaryFile() as seekable_copy:  # parquet is read from the end
        if not seekable:
            shutil.copyfileobj(stream, seekable_copy)
        try:
            file = pq.ParquetFile(stream if seekable else seekable_copy, buffer_size=PART_BYTES)
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
        except pa.ArrowException as error:
            reading.bad(f"{name} is a damaged parquet file (after row {row}): {error}", fix=MAKE_AGAIN)
