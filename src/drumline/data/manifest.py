"""The manifest of a prepared folder: which files, how many tokens, which hashes. Knows nothing of what a token is for.

It is written last, so a folder that has one was finished, and every file is held against it before it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from drumline.errors import DataError
from drumline.files import file_sha256

FORMAT = "drumline-tokens"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
STAMPS = "verified.json"
UNFINISHED = re.compile(r".+\.partial-\w+-\d+")
"""The name of a folder that is being filled: NAME.partial-HOST-PID."""


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

    def write(self, folder: Path) -> None:
        """Write manifest.json and flush it to the disk."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "dtype": np.dtype(self.dtype).name,
            "tokenizer_sha256": self.files[TOKENIZER].sha256,
            **asdict(self),
        }
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())


def token_dtype(vocab_size: int) -> str:
    """The numpy dtype that a token file of this vocabulary has."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def split_files(split: str) -> tuple[str, str, str]:
    """Names of a split's files: tokens, ends of documents, names of documents."""
    return f"{split}.bin", f"{split}.documents.bin", f"{split}.names.txt"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder, checked for form; the files it speaks of are not looked at."""
    path = folder / MANIFEST
    again = f"remove {folder} and make it again with: drumline prepare"
    if UNFINISHED.fullmatch(folder.absolute().name):
        raise DataError(f"{folder} was never finished", fix=again)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", fix=again) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(
            f"{path} is not the manifest of a prepared folder", fix="give a folder made by drumline prepare"
        )
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} is of format {version}, and this drumline reads {FORMAT_VERSION}",
            fix="pip install --upgrade drumline, or prepare the text again",
        )
    try:
        files = {name: FileRecord(int(it["bytes"]), str(it["sha256"])) for name, it in content["files"].items()}
        manifest = Manifest(
            drumline_version=str(content["drumline_version"]),
            source=str(content["source"]),
            source_key=str(content["source_key"]),
            key=str(content["key"]),
            vocab_size=int(content["vocab_size"]),
            end_of_text=int(content["end_of_text"]),
            splits={
                name: SplitRecord(int(it["tokens"]), int(it["documents"]), int(it["text_bytes"]))
                for name, it in content["splits"].items()
            },
            files=files,
        )
        expected = {name for split in manifest.splits for name in split_files(split)} | {TOKENIZER}
        missing = expected - files.keys()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__} {error}", fix=again) from error
    if missing:
        raise DataError(f"{path} is damaged: it says nothing of {', '.join(sorted(missing))}", fix=again)
    for name in files:
        if name in {"", ".", ".."} or "/" in name or "\\" in name:
            raise DataError(f"{path} names a file outside its folder: {name!r}", fix="do not use this folder")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder that lacks a file of its manifest, or has one that is shorter or longer."""
    for name, record in manifest.files.items():
        _size_checked(folder / name, record)


def _size_checked(path: Path, record: FileRecord) -> os.stat_result:
    again = f"copy it again, or remove {path.parent} and make it again with: drumline prepare"
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} is named by its manifest but cannot be read: {error.strerror}", fix=again) from error
    if stat.st_size != record.bytes:
        state = "truncated" if stat.st_size < record.bytes else "longer than it was"
        raise DataError(f"{path} is {state}: {stat.st_size} bytes, where its manifest says {record.bytes}", fix=again)
    return stat


def verify(folder: Path, manifest: Manifest, names: tuple[str, ...]) -> None:
    """Hash the files that were not yet hashed in the state they are in now, and remember those that are right."""
    try:
        stamps = dict(json.loads((folder / STAMPS).read_bytes()))
    except (OSError, ValueError, TypeError):
        stamps = {}
    fresh = {}
    for name in names:
        path, record = folder / name, manifest.files[name]
        stat = _size_checked(path, record)
        stamp = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": record.sha256}
        if stamps.get(name) == stamp:
            continue
        found = file_sha256(path)
        if found != record.sha256:
            what = "not the tokenizer that the tokens were made with" if name == TOKENIZER else "damaged or changed"
            raise DataError(
                f"{path} is {what}: sha256 {found[:12]}, where its manifest says {record.sha256[:12]}",
                fix=f"copy it again, or remove {folder} and make it again with: drumline prepare",
            )
        fresh[name] = stamp
    if fresh:
        aside = folder / f"{STAMPS}.{os.getpid()}"
        with contextlib.suppress(OSError):  # a read-only folder is as good; it is only hashed every time
            try:
                aside.write_text(json.dumps(stamps | fresh, indent=2) + "\n", encoding="utf-8")
                aside.replace(folder / STAMPS)
            finally:
                aside.unlink(missing_ok=True)
