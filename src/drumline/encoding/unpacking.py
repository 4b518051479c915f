"""Compressed files are unpacked ahead, by threads: the blocks of an xz file at once, anything else in one other thread.

The unpacked bytes, their order and the errors are those of reading the file from its beginning.
"""

from __future__ import annotations

import io
import lzma
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from threading import Event
from typing import BinaryIO
from zlib import crc32

LEAST_BYTES = 1 << 20
"""Smaller files are not worth a thread."""
PIECE_BYTES = 1 << 20
PIECES_AHEAD = 8
LARGEST_BLOCK_BYTES = 64 << 20
"""Blocks are unpacked whole; files with larger ones are read by one thread, in pieces."""
BLOCKS_AHEAD_BYTES = 96 << 20
_HEADER_BYTES = _FOOTER_BYTES = 12

Piece = tuple[bytes, Exception | None, int]
"""Unpacked bytes, the error after them, and where in the file they end (0: unknown)."""


def unpacked_ahead(file: BinaryIO, compression: str, serial: Callable[[BinaryIO], io.RawIOBase]) -> io.RawIOBase:
    """The unpacked content of a file; serial: how to unpack it from its beginning"""
    try:
        status = os.fstat(file.fileno())
    except (OSError, AttributeError):
        return serial(file)
    if not stat.S_ISREG(status.st_mode) or status.st_size < LEAST_BYTES:
        return serial(file)
    blocks = _xz_blocks(file, status.st_size) if compression == ".xz" else []
    if len(blocks) > 1 and max(size for _, _, size in blocks) <= LARGEST_BLOCK_BYTES:
        return _Ahead(_unpack_blocks(file, blocks), file)
    return _Ahead(_read_ahead(serial(file)), file)


class _Ahead(io.RawIOBase):
    """Pieces that other threads unpack, as a file."""

    def __init__(self, pieces: Iterator[Piece], file: BinaryIO) -> None:
        self._pieces, self._file = pieces, file
        self._ready = memoryview(b"")
        self._error: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # fewer kinds of buffer
        while not self._ready:
            if self._error is not None:
                raise self._error
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            content, self._error, end = piece
            if end:
                self._file.seek(end)  # from which progress is told
            self._ready = memoryview(content)
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)

    def close(self) -> None:
        with suppress(AttributeError):  # a reader that was never begun
            self._pieces.close()  # type: ignore[attr-defined]  # a generator
        super().close()


def _read_ahead(raw: io.RawIOBase) -> Iterator[Piece]:
    """The content in pieces, read by another thread."""

    def read() -> Piece:
        content = bytearray()
        try:
            while len(content) < PIECE_BYTES and (more := raw.read(PIECE_BYTES - len(content))):
                content += more
        except Exception as error:
            return bytes(content), error, 0
        return bytes(content), None, 0

    with ThreadPoolExecutor(1, thread_name_prefix="unpacker") as unpacker:
        ahead: deque[Future[Piece]] = deque()
        try:
            while True:
                while len(ahead) < PIECES_AHEAD:
                    ahead.append(unpacker.submit(read))
                piece = ahead.popleft().result()
                if not piece[0] and piece[1] is None:
                    return
                yield piece
        finally:
            unpacker.shutdown(cancel_futures=True)


def _unpack_blocks(file: BinaryIO, blocks: list[tuple[int, int, int]]) -> Iterator[Piece]:
    """The blocks in order, each unpacked by a thread."""
    descriptor = file.fileno()
    header, stop = os.pread(descriptor, _HEADER_BYTES, 0), Event()

    def unpack(start: int, packed: int, size: int) -> Piece:
        padded = -(-packed // 4) * 4
        block = os.pread(descriptor, padded, start)
        whole = header + block + _ending(header, packed, size)
        decompressor, content = lzma.LZMADecompressor(format=lzma.FORMAT_XZ), bytearray()
        try:
            content += decompressor.decompress(whole, max_length=PIECE_BYTES)
            while not decompressor.eof and not stop.is_set():
                before = len(content)
                content += decompressor.decompress(b"", max_length=PIECE_BYTES)
                if len(content) == before and not decompressor.eof:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
        except (lzma.LZMAError, EOFError) as error:
            return bytes(content), error, start + padded
        return bytes(content), None, start + padded

    waiting, ahead = deque(blocks), deque[tuple[int, "Future[Piece]"]]()
    most = 1  # at first: who only wants the beginning does not pay for more
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="unpacker") as unpackers:
        try:
            while waiting or ahead:
                while waiting and len(ahead) < most and _fits([size for size, _ in ahead], waiting[0][2]):
                    block = waiting.popleft()
                    ahead.append((block[2], unpackers.submit(unpack, *block)))
                yield ahead.popleft()[1].result()
                most = min(2 * most, 1 + (os.cpu_count() or 1))
        finally:
            stop.set()
            unpackers.shutdown(cancel_futures=True)


def _fits(ahead: list[int], size: int) -> bool:
    return not ahead or sum(ahead) + size <= BLOCKS_AHEAD_BYTES


def _xz_blocks(file: BinaryIO, size: int) -> list[tuple[int, int, int]]:
    """Start, packed and unpacked size of each block, from the index at the end; empty unless all of it fits."""
    descriptor = file.fileno()
    footer = os.pread(descriptor, _FOOTER_BYTES, size - _FOOTER_BYTES)
    index_bytes = (int.from_bytes(footer[4:8], "little") + 1) * 4
    if footer[10:] != b"YZ" or index_bytes > min(size, 64 << 20):
        return []
    index = os.pread(descriptor, index_bytes, size - _FOOTER_BYTES - index_bytes)
    if index[:1] != b"\0" or crc32(index[:-4]) != int.from_bytes(index[-4:], "little"):
        return []
    numbers = _numbers(index[1:-4])
    count = next(numbers, 0)
    records = [(next(numbers, 0), next(numbers, 0)) for _ in range(min(count, index_bytes))]
    starts = [_HEADER_BYTES, *accumulate((-(-packed // 4) * 4 for packed, _ in records), initial=_HEADER_BYTES)][1:]
    if starts[-1] + index_bytes + _FOOTER_BYTES != size:  # several streams, or padding
        return []
    return [(start, packed, unpacked) for start, (packed, unpacked) in zip(starts, records, strict=False)]


def _numbers(data: bytes) -> Iterator[int]:
    """xz's integers: seven bits to a byte, the lowest first; all but the last have the highest bit set."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            yield value
            value = shift = 0


def _number(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _ending(header: bytes, packed: int, size: int) -> bytes:
    """Index and footer of a stream with one block."""
    index = b"\0" + _number(1) + _number(packed) + _number(size)
    index += bytes(-len(index) % 4)
    index += crc32(index).to_bytes(4, "little")
    last = (len(index) // 4 - 1).to_bytes(4, "little") + header[6:8]
    return index + crc32(last).to_bytes(4, "little") + last + b"YZ"
