"""Token files: written once, hashed, memory-mapped ever after. Knows the files and their manifest, not how text got in.

A prepared folder holds, for each split (`train`, `valid`):

    train.bin             token ids, little-endian uint16 (uint32 above 65536 ids); an end of text after every document
    train.documents.bin   little-endian uint64: where each document ends, in tokens
    train.names.txt       the name of each document, one a line

and for all of them tokenizer.json and manifest.json, which is written last: no manifest, no data. The token files of
nanoGPT, llm.c and modded-nanogpt are read as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.data.manifest import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    FileRecord,
    SplitRecord,
    read_manifest,
    split_files,
    token_dtype,
    verify,
)
from drumline.errors import DataError

HEADER_BYTES = 256 * 4
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""llm.c and modded-nanogpt: (magic, version) of the int32 header, and what follows it."""
SCAN_TOKENS = 1 << 24

_VALID_NAMES = ("valid.bin", "val.bin")
"""Ours, and nanoGPT's."""


class TokenWriter:
    """Appends documents to one split of a folder and hashes the files as they grow."""

    def __init__(self, folder: Path, split: str, *, vocab_size: int, end_of_text: int) -> None:
        self._dtype = token_dtype(vocab_size)
        self._vocab_size = vocab_size
        self._end = np.array([end_of_text], dtype=self._dtype).tobytes()
        self._files = [_HashedFile(folder / name) for name in split_files(split)]
        self.tokens = self.documents = self.text_bytes = 0

    def add(self, name: str, ids: npt.ArrayLike, *, text_bytes: int) -> None:
        """Append a document: its ids (1-D) and an end of text. text_bytes: how long its text is in UTF-8."""
        array = np.asarray(ids)
        if array.size and (array.min() < 0 or array.max() >= self._vocab_size):
            raise DataError(
                f"{name} has token {array.max()}, outside the vocabulary of {self._vocab_size}",
                fix="use the tokenizer that the tokens were made with",
            )
        self.tokens += array.size + 1
        self.documents += 1
        self.text_bytes += text_bytes
        tokens, ends, names = self._files
        tokens.write(array.astype(self._dtype, copy=False).tobytes() + self._end)
        ends.write(self.tokens.to_bytes(8, "little"))
        names.write(name.replace("\n", " ").replace("\r", " ").encode(errors="backslashreplace") + b"\n")

    def close(self) -> tuple[SplitRecord, dict[str, FileRecord]]:
        """Flush to the disk; what was written, and the record of each file by its name."""
        files = {file.name: file.close() for file in self._files}
        return SplitRecord(tokens=self.tokens, documents=self.documents, text_bytes=self.text_bytes), files

    def abandon(self) -> None:
        """Close the files without care for what is in them."""
        for file in self._files:
            file.abandon()


class _HashedFile:
    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 - closed by close() or abandon()
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self._bytes += len(data)

    def close(self) -> FileRecord:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(bytes=self._bytes, sha256=self._sha256.hexdigest())

    def abandon(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the last buffer cannot be written
            self._file.close()


@dataclass(frozen=True)
class TokenFile:
    """A split, memory-mapped. What a foreign file does not tell is None."""

    path: Path
    tokens: npt.NDArray[Any]
    """uint16 or uint32 (N,)"""
    vocab_size: int | None = None
    end_of_text: int | None = None
    text_bytes: int | None = None
    tokenizer_path: Path | None = None
    sha256: str | None = None
    document_ends: npt.NDArray[np.uint64] | None = None
    """(documents,): the position after each document's end of text"""
    names_path: Path | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens start..stop-1 as int64 (stop - start,)."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        return self.tokens[start:stop].astype(np.int64)

    def document_names(self, start: int, stop: int) -> list[str]:
        """Names of the documents that have a token in start..stop-1; none where the file does not tell."""
        if self.document_ends is None or self.names_path is None or start >= stop:
            return []
        # uint64 needles: with Python ints numpy would first turn the whole map into float64.
        inside = np.array([start, stop - 1], dtype=np.uint64)
        first, last = np.searchsorted(self.document_ends, inside, side="right").tolist()
        with open(self.names_path, encoding="utf-8", newline="\n") as lines:
            return [line.rstrip("\n") for line in itertools.islice(lines, first, last + 1)]


def is_tokens(path: str | Path) -> bool:
    """Whether a path names token data rather than text: a .bin file, or a folder that has train.bin or our manifest."""
    path = Path(path)
    if not path.is_dir():
        return path.suffix == ".bin"
    manifest = path / MANIFEST
    return (path / "train.bin").is_file() or (manifest.is_file() and FORMAT.encode() in manifest.read_bytes())


def has_tokens(path: str | Path, split: str) -> bool:
    """Whether a folder has this split beside others. A .bin file is a split by itself and has no other."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return split in read_manifest(path).splits
    return any((path / name).is_file() for name in _bin_names(split))


def open_tokens(path: str | Path, *, split: str = "train", vocab_size: int | None = None) -> TokenFile:
    """Open a prepared folder's split, one of its .bin files, or a token file of nanoGPT, llm.c or modded-nanogpt.

    vocab_size: refuse data with a token that this vocabulary does not have.
    """
    path = Path(path)
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _open_prepared(path, split, vocab_size=vocab_size)
        path = _bin_of_folder(path, split)
    elif not path.is_file():
        raise DataError(f"there is no token file {path}", fix="check the path, or make it with: drumline prepare")
    if (path.parent / MANIFEST).exists() and path.name in read_manifest(path.parent).files:
        return _open_prepared(path.parent, path.stem, vocab_size=vocab_size)
    return _open_foreign(path, vocab_size=vocab_size)


def _open_prepared(folder: Path, split: str, *, vocab_size: int | None) -> TokenFile:
    manifest = read_manifest(folder)
    record = manifest.splits.get(split)
    if record is None:
        raise DataError(
            f"{folder} has no {split} tokens, only {', '.join(manifest.splits)}",
            fix="give another folder, or prepare the text again with --valid_fraction above 0",
        )
    if vocab_size is not None and manifest.vocab_size > vocab_size:
        raise DataError(
            f"{folder} has a vocabulary of {manifest.vocab_size} ids, more than the {vocab_size} asked for",
            fix=f"use --vocab_size {manifest.vocab_size}, or tokens made with the smaller vocabulary",
        )
    tokens, ends, names = split_files(split)
    verify(folder, manifest, (TOKENIZER, tokens, ends, names))
    dtype = manifest.dtype
    for name, items, width in ((tokens, record.tokens, np.dtype(dtype).itemsize), (ends, record.documents, 8)):
        if manifest.files[name].bytes != items * width or items == 0:
            raise DataError(
                f"{folder / name} has {manifest.files[name].bytes} bytes, which are not {items} items of {width}",
                fix=f"remove {folder} and make it again with: drumline prepare",
            )
    return TokenFile(
        path=folder / tokens,
        tokens=np.memmap(folder / tokens, dtype=dtype, mode="r"),
        vocab_size=manifest.vocab_size,
        end_of_text=manifest.end_of_text,
        text_bytes=record.text_bytes,
        tokenizer_path=folder / TOKENIZER,
        sha256=manifest.files[tokens].sha256,
        document_ends=np.memmap(folder / ends, dtype="<u8", mode="r"),
        names_path=folder / names,
    )


def _bin_names(split: str) -> list[str]:
    return list(_VALID_NAMES) if split == "valid" else [f"{split}.bin"]


def _bin_of_folder(folder: Path, split: str) -> Path:
    names = _bin_names(split)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(
        f"{folder} has no {' or '.join(names)}", fix="name a .bin file, or a folder made by drumline prepare"
    )


def _open_foreign(path: Path, *, vocab_size: int | None) -> TokenFile:
    size = path.stat().st_size
    if path.with_name(split_files(path.stem)[1]).exists():
        raise DataError(
            f"{path} was never finished: {path.parent} has no {MANIFEST}",
            fix=f"remove {path.parent} and run drumline prepare again",
        )
    if path.with_suffix(".idx").exists():
        raise DataError(
            f"{path} has an .idx beside it, as Megatron's files do, and drumline does not read those",
            fix="give drumline the text, or write the tokens as raw uint16",
        )
    if size == 0:
        raise DataError(f"{path} is empty", fix="make it again, or give another file")
    dtype, count, offset = _layout(path, size)
    tokens = np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
    if vocab_size is not None:
        _check_vocabulary(path, tokens, vocab_size=vocab_size)
    return TokenFile(path=path, tokens=tokens, vocab_size=vocab_size)


def _layout(path: Path, size: int) -> tuple[str, int, int]:
    """dtype, number of tokens and offset in bytes, from the header if there is one."""
    with open(path, "rb") as file:
        start = file.read(12)
    magic, version, count = np.frombuffer(start.ljust(12, b"\0"), dtype="<i4").tolist()
    if size >= HEADER_BYTES and magic in {known for known, _ in HEADERS}:
        dtype = HEADERS.get((magic, version))
        if dtype is None:
            raise DataError(
                f"{path} has llm.c's header {magic} of version {version}, which drumline does not know",
                fix="write it again as version 1 (uint16) or as raw uint16 without a header",
            )
        expected = HEADER_BYTES + count * np.dtype(dtype).itemsize
        if size != expected or count <= 0:
            state = "truncated" if size < expected else "not what its header says"
            raise DataError(
                f"{path} is {state}: {size} bytes, where its header says {count} tokens, {expected} bytes",
                fix="copy or download it again",
            )
        return dtype, count, HEADER_BYTES
    if size % 2:
        raise DataError(
            f"{path} is truncated or not a token file: {size} bytes is not a whole number of uint16 tokens",
            fix="copy it again; a raw .bin holds little-endian uint16 and nothing else",
        )
    return "<u2", size // 2, 0


def _check_vocabulary(path: Path, tokens: npt.NDArray[Any], *, vocab_size: int) -> None:
    for start in range(0, len(tokens), SCAN_TOKENS):
        outside = tokens[start : start + SCAN_TOKENS] >= vocab_size
        if outside.any():
            position = start + int(outside.argmax())
            raise DataError(
                f"token {tokens[position]} at position {position} of {path} is outside the vocabulary of {vocab_size}",
                fix="use the vocabulary the file was made with (--vocab_size), or make the tokens again",
            )
