"""Existing token files: a prepared folder, checked against its manifest, or another trainer's files.

Reads the token files of nanoGPT (raw uint16), llm.c and modded-nanogpt (with a header) as they are.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import psutil

from drumline.config import DataConfig, DataDtype
from drumline.data.cutting import check_whole
from drumline.data.preparing import Data, Prepared
from drumline.data.text_files import Skipped
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    FileRecord,
    Manifest,
    SplitRecord,
    TokenFile,
    map_split,
    split_files,
)
from drumline.errors import DataError
from drumline.files import Parts, verify
from drumline.lazy import room

UNFINISHED = re.compile(r".+\.partial-\w+-\d+")
"""The name of a folder that is being written: NAME.partial-HOST-PID."""
HEADER_BYTES = 256 * 4
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""llm.c and modded-nanogpt: (magic, version) of the int32 header, and the dtype of the tokens after it."""
DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's .idx: how it begins, and the code of the tokens' dtype, its 18th byte."""
SCAN_TOKENS = 1 << 24
GUESS_BYTES = 1 << 18
GUESS_TOKENS = 32
"""With fewer tokens, zeros may stand in every second place by chance."""
LARGEST_HIGH_HALF = 31
"""The largest upper half of an id: vocabularies have less than two million ids."""


targets_file = "{}.targets.bin".format
"""The name of a split's file that says what each token of conversations is as a target."""


def has_tokens(path: str | Path, split: str) -> bool:
    """Whether a folder has this split besides others. A .bin file is a single split."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return split in read_manifest(path).splits
    return _bin_file(path, split) is not None


def open_tokens(
    path: str | Path, *, split: str = "train", vocab_size: int | None = None, dtype: DataDtype = "auto"
) -> TokenFile:
    """Open a split of a prepared folder, one of its .bin files, or a token file of nanoGPT, llm.c or modded-nanogpt.

    vocab_size: reject data with tokens outside this vocabulary.
    dtype:      of the tokens in a file that does not say; auto: uint16, unless they do not look like it
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        return _open_prepared(path, split, vocab_size=vocab_size)
    if path.is_file() and (path.parent / MANIFEST).exists() and path.name in read_manifest(path.parent).files:
        return _open_prepared(path.parent, path.stem, vocab_size=vocab_size)
    return _open_foreign(path, split, vocab_size=vocab_size, dtype=dtype)


def open_token_data(data: DataConfig, prepared: Prepared | None) -> Data:
    """The token data of a run: of its tokenized text, or of the token files in its config."""
    path = prepared.path if prepared else Path(data.train_data_path)
    tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer else None
    dtype = data.data_dtype
    train = open_tokens(path, split="train", dtype=dtype)
    if train.vocab_size is None:  # other trainers' files do not say: check against the tokenizer or the setting
        largest = tokenizer.vocab_size if tokenizer else data.vocab_size
        train = open_tokens(path, split="train", vocab_size=largest, dtype=dtype)
    if tokenizer is None and train.tokenizer_path is not None:
        tokenizer = Tokenizer.load(train.tokenizer_path)
    vocab_size = train.vocab_size or (tokenizer.vocab_size if tokenizer else data.vocab_size)
    assert vocab_size is not None
    valid_path: str | Path | None = data.valid_data_path if prepared is None else None
    if valid_path is None and has_tokens(path, "valid"):
        valid_path = path
    valid = None
    if valid_path is not None:
        valid = open_tokens(valid_path, split="valid", vocab_size=vocab_size, dtype=dtype)
    return Data(train, valid, tokenizer, vocab_size, Skipped())


def _open_prepared(folder: Path, split: str, *, vocab_size: int | None) -> TokenFile:
    manifest = read_manifest(folder)
    record = manifest.splits.get(split)
    if record is None:
        raise DataError(
            f"{folder} has no {split} tokens, only {', '.join(manifest.splits)}",
            fix="use another folder, or tokenize the text again with --valid_fraction above 0",
        )
    if vocab_size is not None and manifest.vocab_size > vocab_size:
        raise DataError(
            f"{folder} has a vocabulary of {manifest.vocab_size}, larger than the requested {vocab_size}",
            fix=f"use --vocab_size {manifest.vocab_size}, or tokens with a smaller vocabulary",
        )
    tokens, ends, names = split_files(split)
    targets = [name for name in (targets_file(split),) if name in manifest.files]
    for name in (TOKENIZER, tokens, ends, names, *targets):
        _size_checked(folder / name, manifest.files[name])
    sha256s = {name: manifest.files[name].sha256 for name in (TOKENIZER, tokens, ends, names, *targets)}
    parts = verify(folder, sha256s, tokenizer=TOKENIZER)
    for name, items, width in ((tokens, record.tokens, np.dtype(manifest.dtype).itemsize), (ends, record.documents, 8)):
        if manifest.files[name].bytes != items * width or items == 0:
            raise DataError(
                f"{folder / name} has {manifest.files[name].bytes} bytes, which is not {items} items of {width} bytes",
                fix=f"remove {folder} and run drumline prepare again",
            )
    opened = map_split(folder, manifest, split)
    for name in targets:
        return room("chats").chat_tokens(opened, folder / name, parts[tokens], parts[name])  # type: ignore[no-any-return]
    return CheckedTokens.of(opened, parts[tokens])


@dataclass(frozen=True)
class CheckedTokens(TokenFile):
    """Tokens that are compared with what was prepared when they are first read."""

    parts: Parts | None = None

    @classmethod
    def of(cls, file: TokenFile, hashes: list[int], **more: Any) -> Self:
        parts = Parts(file.path, file.tokens.view(np.uint8).data, hashes)
        parts.check_some()
        return cls(**{each.name: getattr(file, each.name) for each in fields(TokenFile)}, parts=parts, **more)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        if self.parts is not None:
            self.parts.check(start * self.tokens.itemsize, stop * self.tokens.itemsize)
        return super().read(start, stop)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder, validated; the files that it lists are not opened."""
    path = folder / MANIFEST
    again = f"remove {folder} and run drumline prepare again"
    if UNFINISHED.fullmatch(folder.absolute().name):
        raise DataError(f"{folder} is incomplete", fix=again)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", fix=again) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is not the manifest of a prepared folder", fix="use a folder made by drumline prepare")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version}, but this drumline reads version {FORMAT_VERSION}",
            fix="pip install --upgrade drumline, or tokenize the text again",
        )
    try:
        values = {field.name: content[field.name] for field in fields(Manifest)}
        for number in ("vocab_size", "end_of_text"):
            values[number] = int(values[number])
        values["splits"] = {name: SplitRecord(**split) for name, split in values["splits"].items()}
        values["files"] = {name: FileRecord(**file) for name, file in values["files"].items()}
        manifest = Manifest(**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__} {error}", fix=again) from error
    missing = {TOKENIZER, *(name for split in manifest.splits for name in split_files(split))} - manifest.files.keys()
    if missing:
        raise DataError(f"{path} is damaged: it does not list {', '.join(sorted(missing))}", fix=again)
    for name in manifest.files:
        if name in {"", ".", ".."} or "/" in name or "\\" in name:
            raise DataError(f"{path} lists a file outside its folder: {name!r}", fix="do not use this folder")
    return manifest


def manifest_of_key(folder: Path, key: str, *, source: str) -> Manifest:
    """The manifest of a folder that has this key and files of the right size; any other folder is rejected."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        manifest = None
    if manifest is None or manifest.key != key:
        content = "is not a prepared folder" if manifest is None else f"has other tokens (of {manifest.source})"
        problem = f"{folder} exists and {content}, not those of {source} with these settings"
        raise DataError(problem, fix=f"choose another --out, or remove it: rm -r {folder}")
    for name, record in manifest.files.items():
        _size_checked(folder / name, record)
    return check_whole(folder, manifest)


def _size_checked(path: Path, record: FileRecord) -> None:
    again = f"copy it again, or remove {path.parent} and run drumline prepare again"
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path} is listed in its manifest but cannot be read: {error.strerror}", fix=again) from error
    if stat.st_size != record.bytes:
        state = "truncated" if stat.st_size < record.bytes else "too long"
        raise DataError(f"{path} is {state}: {stat.st_size} bytes, but {record.bytes} in its manifest", fix=again)


def _bin_file(folder: Path, split: str) -> Path | None:
    """A folder's file of this split, by drumline's name or nanoGPT's."""
    return next((folder / name for name in _bin_names(split) if (folder / name).is_file()), None)


def _bin_names(split: str) -> list[str]:
    return ["valid.bin", "val.bin", "validation.bin"] if split == "valid" else [f"{split}.bin"]


def _open_foreign(path: Path, split: str, *, vocab_size: int | None, dtype: DataDtype) -> TokenFile:
    """A .bin file, or the one in a folder that has this split."""
    if path.is_dir():
        file = _bin_file(path, split)
        if file is None:
            names = " or ".join(_bin_names(split))
            raise DataError(f"{path} has no {names}", fix="use a .bin file, or a folder made by drumline prepare")
        path = file
    elif not path.is_file():
        raise DataError(f"token file {path} does not exist", fix="check the path, or create it with: drumline prepare")
    size = path.stat().st_size
    if path.with_name(split_files(path.stem)[1]).exists():
        raise DataError(
            f"{path} is incomplete: {path.parent} has no {MANIFEST}",
            fix=f"remove {path.parent} and run drumline prepare again",
        )
    if size == 0:
        raise DataError(f"{path} is empty", fix="create it again, or use another file")
    if path.with_suffix(".idx").exists():
        _check_megatron(path, dtype)
    stored, count, offset = _layout(path, size, dtype)
    tokens = np.memmap(path, dtype=stored, mode="r", offset=offset, shape=(count,))
    if vocab_size is not None:
        _check_vocabulary(path, tokens, vocab_size=vocab_size)
    return TokenFile(path=path, tokens=tokens, vocab_size=vocab_size)


def _check_megatron(path: Path, dtype: DataDtype) -> None:
    """Megatron's .bin has no header; its .idx has the dtype, and where documents end."""
    index = path.with_suffix(".idx")
    with open(index, "rb") as file:
        start = file.read(18)
    stored = MEGATRON_DTYPES.get(start[17]) if start.startswith(MEGATRON) and len(start) == 18 else None
    if dtype == "auto" or (stored is not None and dtype != stored):
        known = f"{stored} according to {index.name}" if stored else "unknown"
        raise DataError(
            f"{path} comes with {index.name}, like Megatron's data: the dtype of its tokens is {known}",
            fix=f"add --data_dtype {stored or 'int32 (or int64, uint16)'} to read the tokens as one sequence",
        )


def _layout(path: Path, size: int, dtype: DataDtype) -> tuple[str, int, int]:
    """dtype, number of tokens and byte offset, from the header if there is one."""
    with open(path, "rb") as file:
        start = file.read(12)
    if start.startswith(b"\x93NUMPY"):
        raise DataError(f"{path} is a .npy file", fix=f"write it without a header: np.load(...).tofile('{path.name}')")
    magic, version, count = np.frombuffer(start.ljust(12, b"\0"), dtype="<i4").tolist()
    if size >= HEADER_BYTES and magic in {known for known, _ in HEADERS}:
        stored = HEADERS.get((magic, version))
        if stored is None:
            raise DataError(
                f"{path} has an llm.c header with magic {magic}, version {version}, which drumline does not support",
                fix="write it as version 1 (uint16), or as raw uint16 without a header",
            )
        if dtype != "auto" and DTYPES[dtype] != stored:
            name = np.dtype(stored).name
            raise DataError(f"{path} is {name} according to its header, not {dtype}", fix="drop --data_dtype")
        expected = HEADER_BYTES + count * np.dtype(stored).itemsize
        if size != expected or count <= 0:
            state = "truncated" if size < expected else "inconsistent with its header"
            raise DataError(
                f"{path} is {state}: {size} bytes, but its header says {count} tokens, {expected} bytes",
                fix="copy or download it again",
            )
        return stored, count, HEADER_BYTES
    name = "uint16" if dtype == "auto" else dtype
    width = np.dtype(DTYPES[name]).itemsize
    if size % width:
        raise DataError(
            f"{path} is truncated or not a token file: {size} bytes is not a whole number of {name} tokens",
            fix="copy it again; a raw .bin file contains only little-endian tokens (--data_dtype)",
        )
    if dtype == "auto":
        _check_looks_like_uint16(path, size)
    return DTYPES[name], size // width, 0


def _check_looks_like_uint16(path: Path, size: int) -> None:
    """Wider tokens have zeros, or small numbers, in the places of their upper halves: nothing else looks like that."""
    with open(path, "rb") as file:
        halves = np.frombuffer(file.read(GUESS_BYTES)[: size // 8 * 8], dtype="<u2").reshape(-1, 4)
    largest = halves.max(axis=0, initial=0)
    if halves.size < GUESS_TOKENS:
        return
    if size % 8 == 0 and largest[0] > largest[1] and largest[1] <= LARGEST_HIGH_HALF and not largest[2:].any():
        meant = "int64"
    elif size % 4 == 0 and _are_upper(largest[1::2], of=largest[::2]):
        meant = "uint32"
    elif size % 4 == 0 and _are_upper(largest[::2], of=largest[1::2]):
        raise DataError(
            f"{path} looks like big-endian tokens: every second place of two bytes, from the first, is zero",
            fix="write it as little-endian: tokens.astype('<u4').tofile(...), and add --data_dtype uint32",
        )
    else:
        return
    what = "zeros" if meant == "int64" else "a small number"
    raise DataError(
        f"{path} does not look like uint16 tokens but like {meant}: {what} in every second place",
        fix=f"add --data_dtype {meant}, or --data_dtype uint16 if that is what they are",
    )


def _are_upper(halves: npt.NDArray[Any], *, of: npt.NDArray[Any]) -> bool:
    """Whether the largest values in some places are those of upper halves: all zero, or small beside large ones."""
    if not halves.any():
        return bool(of.any())
    return bool(halves.max() <= LARGEST_HIGH_HALF and of.max() > 1 << 12)


def _check_vocabulary(path: Path, tokens: npt.NDArray[Any], *, vocab_size: int) -> None:
    for start in range(0, len(tokens), SCAN_TOKENS):
        part = tokens[start : start + SCAN_TOKENS]
        outside = (part >= vocab_size) | (part < 0)
        if outside.any():
            position = start + int(outside.argmax())
            raise DataError(
                f"token {tokens[position]} at position {position} of {path} is outside the vocabulary of {vocab_size}",
                fix="use the vocabulary that the file was made with (--vocab_size), its dtype (--data_dtype; read as "
                f"{tokens.dtype.name}), or create the tokens again",
            )


def remove_leftovers(paths: Sequence[Path], prefix: str) -> None:
    """Remove temporary folders, PREFIX and a process id, of processes of this host that were killed."""
    for path in paths:
        pid = path.name.removeprefix(prefix)
        if pid.isdecimal() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(path)


def document_names(file: TokenFile, start: int, stop: int) -> list[str]:
    """Names of the documents in tokens start..stop-1; empty if unknown."""
    if file.document_ends is None or file.names_path is None or start >= stop:
        return []
    # uint64 needles: with Python ints, numpy would convert the whole map to float64.
    inside = np.array([start, stop - 1], dtype=np.uint64)
    first, last = np.searchsorted(file.document_ends, inside, side="right").tolist()
    with open(file.names_path, encoding="utf-8", newline="\n") as lines:
        return [line.rstrip("\n") for line in itertools.islice(lines, first, last + 1)]


def names_of_windows(file: TokenFile, windows: Sequence[int], context: int) -> list[str]:
    """Names of the documents in some windows of `context` tokens, in order, each once."""
    names: dict[str, None] = {}
    for window in windows:
        names |= dict.fromkeys(document_names(file, window * context, (window + 1) * context))
    return list(names)
