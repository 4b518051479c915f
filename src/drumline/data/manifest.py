"""The manifest of a prepared folder: which files, how many tokens, which hashes. Knows nothing of what a token is for.

It is written last, so a folder that has one was finished. `drumline.data.opening` reads it and checks the files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from drumline.files import flush

FORMAT = "drumline-tokens"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """What a manifest says of a split. text_bytes: UTF-8 bytes of the text, ends of text not counted."""

    tokens: int
    documents: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a prepared folder holds."""

    drumline_version: str
    source: str
    """What the text was, as the user named it."""
    source_key: str
    """Which state of it was read: files with sizes and times, a version, a name."""
    key: str
    """A digest of everything that decides the folder's content; equal keys mean equal tokens."""
    vocab_size: int
    end_of_text: int
    splits: dict[str, SplitRecord]
    files: dict[str, FileRecord]

    @property
    def dtype(self) -> str:
        return token_dtype(self.vocab_size)

    @property
    def text_bytes(self) -> int:
        return sum(split.text_bytes for split in self.splits.values())

    def write(self, folder: Path) -> None:
        """Write manifest.json and flush it to the disk."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dtype": np.dtype(self.dtype).name,
            "tokenizer_sha256": self.files[TOKENIZER].sha256,
            **asdict(self),
        }
        (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        flush(folder / MANIFEST)


def token_dtype(vocab_size: int) -> str:
    """The numpy dtype that a token file of this vocabulary has."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def split_files(split: str) -> tuple[str, str, str]:
    """Names of a split's files: tokens, ends of documents, names of documents."""
    return f"{split}.bin", f"{split}.documents.bin", f"{split}.names.txt"
