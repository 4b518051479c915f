"""Existing token files: a prepared folder, checked against its manifest, or another trainer's files (foreign.py)."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import psutil

from drumline.config import DataConfig, DataDtype, is_mix
from drumline.data.cutting import check_whole
from drumline.data.foreign import bin_file, open_foreign
from drumline.data.preparing import Data, Prepared
from drumline.data.sources import Skipped
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
from drumline.errors import ConfigError, DataError
from drumline.files import PartHashes, Parts, parts_file, sampled, verify
from drumline.lazy import room

UNFINISHED = re.compile(r".+\.partial-\w+-\d+")
"""The name of a folder that is being written: NAME.partial-HOST-PID."""
STORE = "store.json"
"""In a folder that is the local one of a folder in a store: says which."""
targets_file = "{}.targets.bin".format
"""The name of a split's file that says what each token of conversations is as a target."""


def has_tokens(path: str | Path, split: str) -> bool:
    """Whether a folder has this split besides others. A .bin file is a single split."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return split in read_manifest(path).splits
    return bin_file(path, split) is not None


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
    return open_foreign(path, split, vocab_size=vocab_size, dtype=dtype)


def open_token_data(data: DataConfig, prepared: Prepared | None) -> Data:
    """The token data of a run: of its tokenized text, or of the token files in its config."""
    if "://" in f"{data.train_data_path} {data.valid_data_path}" and prepared is None:
        data = room("stores").mirrored(data)
    if prepared is None and is_mix(data.train_data_path):
        return room("mixes").open_mix(data)  # type: ignore[no-any-return]
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
    splits = (("train", train), ("valid", valid))
    samples = {split: sampled(file.path) for split, file in splits if file is not None and file.sha256 is None}
    return Data(train, valid, tokenizer, vocab_size, Skipped(), samples=samples)


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
    if (folder / STORE).exists():
        stored: TokenFile | None = room("stores").open_split(folder, manifest, split, (tokens, ends, names))
        if stored is not None:
            return stored
    targets = [name for name in (targets_file(split),) if name in manifest.files]
    used = [TOKENIZER, tokens, ends, names, *targets]
    used += [beside for beside in map(parts_file, used) if beside in manifest.files]
    for name in used:
        _size_checked(folder / name, manifest.files[name])
    parts = verify(folder, {name: manifest.files[name].sha256 for name in used}, tokenizer=TOKENIZER)
    for name in (ends, names):
        if parts_file(name) in used:
            Parts(folder / name, np.memmap(folder / name, mode="r").data, parts[name]).check_some()
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
    def of(cls, file: TokenFile, hashes: PartHashes, **more: Any) -> Self:
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
    found = (document_names(file, window * context, (window + 1) * context) for window in windows)
    return list(dict.fromkeys(name for names in found for name in names))


def refuse_tokens_beside_text(data: DataConfig) -> NoReturn:
    raise ConfigError(
        f"train_data_path {data.train_data_path} is text, but valid_data_path {data.valid_data_path} is tokens",
        fix="use text for both, or tokens made by one `drumline prepare` for both",
    )


def refuse_batches(tokens: TokenFile, context: int) -> NoReturn:
    """Of tokens that are too few for one sequence, or without the end-of-text token that --document_mask needs."""
    if len(tokens) <= context:
        raise DataError(
            f"{tokens.path} has {len(tokens)} tokens, too few for one sequence of {context} and its last target",
            fix="train on more text, or lower --context",
        )
    raise ConfigError(
        f"--document_mask needs the end-of-text token, which {tokens.path} does not define",
        fix="tokenize the text with drumline prepare, or drop --document_mask",
    )


def not_writable(out: Path, error: OSError) -> DataError:
    """The error of a folder of tokens that cannot be written."""
    return DataError(
        f"{out} is not writable: {error.strerror or error}",
        fix="free up space and run the same command again, or choose another folder",
    )
