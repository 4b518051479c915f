"""Token files and their manifest: written once, hashed, then memory-mapped. Independent of text.

A prepared folder contains, for each split (`train`, `valid`):

        train.bin             token ids, little-endian uint16 (uint32 above 65536 ids); end-of-text after each document
        train.documents.bin   little-endian uint64: where each document ends, in tokens
        train.names.txt       the name of each document, one per line
        train.targets.bin     of conversations only: uint8, what each token is as a target (see drumline.chats)
        NAME.crc32            of large files: hashes of their parts (see drumline.files.verified)

and for all of them tokenizer.json and manifest.json, which is written last: without it, the folder is incomplete.
Existing folders are opened by `drumline.data.opening`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from drumline.config import is_mix
from drumline.errors import DataError
from drumline.files import file_sha256, flush

FORMAT = "drumline-tokens"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
LARGE_BYTES = 16 << 20
"""From this size on, a file has the hashes of its parts beside it: to hash all of it at every start takes too long."""


@dataclass(frozen=True)
class FileRecord:
    """Manifest entry of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """Manifest entry of a split. text_bytes: UTF-8 bytes of the text, without end-of-text tokens."""

    tokens: int
    documents: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a prepared folder."""

    drumline_version: str
    source: str
    """The data source, as the user wrote it."""
    source_key: str
    """The version of the source that was read: files with sizes and times, a version, a name."""
    key: str
    """A digest of everything that determines the content; equal keys mean equal tokens."""
    vocab_size: int
    end_of_text: int
    splits: dict[str, SplitRecord]
    files: dict[str, FileRecord]

    @property
    def dtype(self) -> str:
        return token_dtype(self.vocab_size)

    def write(self, folder: Path) -> None:
        """Write manifest.json and flush it to disk."""
        content: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION, "documents": "whole"}
        content |= {"dtype": np.dtype(self.dtype).name, "tokenizer_sha256": self.files[TOKENIZER].sha256}
        content |= asdict(self)
        (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        flush(folder / MANIFEST)


def recorded(paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Flush finished files to disk, large ones with the hashes of their parts; manifest entries by name."""
    paths = list(paths)
    if large := [path for path in paths if path.suffix != ".json" and path.stat().st_size >= LARGE_BYTES]:
        from drumline.files import hash_parts

        paths += map(hash_parts, large)
    for path in paths:
        flush(path)
    return {path.name: FileRecord(path.stat().st_size, file_sha256(path)) for path in paths}


def token_dtype(vocab_size: int) -> str:
    """The numpy dtype of token files with this vocabulary."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def split_files(split: str) -> tuple[str, str, str]:
    """Names of a split's files: tokens, document ends, document names."""
    return f"{split}.bin", f"{split}.documents.bin", f"{split}.names.txt"


class TokenWriter:
    """Appends documents to one split of a folder."""

    def __init__(self, folder: Path, split: str, *, vocab_size: int, end_of_text: int) -> None:
        self._dtype, self._vocab_size = token_dtype(vocab_size), vocab_size
        self._end = np.array([end_of_text], dtype=self._dtype).tobytes()
        self.paths = [folder / name for name in split_files(split)]
        self._files = [open(path, "wb", buffering=1 << 20) for path in self.paths]  # noqa: SIM115 - see abandon()
        self.tokens = self.documents = self.text_bytes = 0

    def add(self, name: str, ids: npt.ArrayLike, *, text_bytes: int, more: bool = False) -> None:
        """Append a document: its ids (1-D) and an end-of-text token. text_bytes: length of its text in UTF-8.

        more: this is a part of it, and the next call continues it
        """
        array = np.asarray(ids)
        if array.size and (array.min() < 0 or array.max() >= self._vocab_size):
            raise DataError(
                f"{name} has token {array.max()}, outside the vocabulary of {self._vocab_size}",
                fix="use the tokenizer that the tokens were made with",
            )
        self.tokens += array.size + (not more)
        self.text_bytes += text_bytes
        tokens, ends, names = self._files[:3]
        tokens.write(array.astype(self._dtype, copy=False).tobytes() + (b"" if more else self._end))
        if more:
            return
        self.documents += 1
        ends.write(self.tokens.to_bytes(8, "little"))
        names.write(name.replace("\n", " ").replace("\r", " ").encode(errors="backslashreplace") + b"\n")

    def close(self) -> SplitRecord:
        """Close the files; returns what was written."""
        for file in self._files:
            file.close()
        return SplitRecord(tokens=self.tokens, documents=self.documents, text_bytes=self.text_bytes)

    def abandon(self) -> None:
        """Close the files, ignoring their content."""
        for file in self._files:
            with contextlib.suppress(OSError):  # a full disk: the last buffer cannot be written
                file.close()


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped split. None: unknown, in another trainer's file."""

    packer: ClassVar[str] = ""
    """The room that reads windows that are not slices of the file"""

    path: Path
    tokens: npt.NDArray[Any]
    """uint16 or uint32 (N,)"""
    vocab_size: int | None = None
    end_of_text: int | None = None
    text_bytes: int | None = None
    tokenizer_path: Path | None = None
    sha256: str | None = None
    document_ends: npt.NDArray[np.uint64] | None = None
    """(documents,): the position after each document's end-of-text token"""
    names_path: Path | None = None
    targets: npt.NDArray[np.uint8] | None = None
    """(N,): which tokens count, of conversations; None for plain text, where all do"""

    def __len__(self) -> int:
        return len(self.tokens)

    def windows(self, context: int) -> int:
        """Number of sequences of `context` tokens; the last one may be short."""
        return -(-(len(self) - 1) // context)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens start..stop-1 as int64 (stop - start,)."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        return self.tokens[start:stop].astype(np.int64)


def is_tokens(path: str | Path) -> bool:
    """Whether a path is token data and not text: .bin file, folder with train.bin or a manifest, URL, mix of them."""
    path = Path(path)
    if not path.is_dir():
        return path.suffix == ".bin" or ":/" in str(path) or is_mix(str(path))
    manifest = path / MANIFEST
    return (path / "train.bin").is_file() or (manifest.is_file() and FORMAT.encode() in manifest.read_bytes())


def map_split(folder: Path, manifest: Manifest, split: str) -> TokenFile:
    """A split of a prepared folder whose files are known to match the manifest."""
    tokens, ends, names = split_files(split)
    return TokenFile(
        path=folder / tokens,
        tokens=np.memmap(folder / tokens, dtype=manifest.dtype, mode="r"),
        vocab_size=manifest.vocab_size,
        end_of_text=manifest.end_of_text,
        text_bytes=manifest.splits[split].text_bytes,
        tokenizer_path=folder / TOKENIZER,
        sha256=manifest.files[tokens].sha256,
        document_ends=np.memmap(folder / ends, dtype="<u8", mode="r"),
        names_path=folder / names,
    )
