"""Token files of other trainers, read as they are: nanoGPT (raw uint16), llm.c and modded-nanogpt (with a header)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.config import DataDtype
from drumline.data.tokens import MANIFEST, TokenFile, split_files
from drumline.errors import DataError

HEADER_BYTES = 256 * 4
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""llm.c and modded-nanogpt: (magic, version) of the int32 header, and the dtype of the tokens after it."""
DTYPES = {"uint16": "<u2", "uint32": "<u4", "int32": "<i4", "int64": "<i8"}
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's .idx: how it begins, and the code of the tokens' dtype, its 18th byte."""
SCAN_TOKENS = 1 << 20
MOST_SCANNED = 1 << 26
"""Of larger files of other trainers, only about so many ids are looked at when they are opened."""
GUESS_BYTES = 1 << 18
GUESS_TOKENS = 32
"""With fewer tokens, zeros may stand in every second place by chance."""
LARGEST_HIGH_HALF = 31
"""The largest upper half of an id: vocabularies have less than two million ids."""


def bin_file(folder: Path, split: str) -> Path | None:
    """A folder's file of this split, by drumline's name or nanoGPT's."""
    return next((folder / name for name in _bin_names(split) if (folder / name).is_file()), None)


def _bin_names(split: str) -> list[str]:
    return ["valid.bin", "val.bin", "validation.bin"] if split == "valid" else [f"{split}.bin"]


def open_foreign(path: Path, split: str, *, vocab_size: int | None, dtype: DataDtype) -> TokenFile:
    """A .bin file, or the one in a folder that has this split."""
    if path.is_dir():
        file = bin_file(path, split)
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
    if vocab_size is None:
        return TokenFile(path=path, tokens=tokens)
    for start in scanned_places(count):
        _check_vocabulary(path, tokens[start : start + SCAN_TOKENS], vocab_size=vocab_size, start=start)
    return (_UnscannedTokens if count > MOST_SCANNED else TokenFile)(path=path, tokens=tokens, vocab_size=vocab_size)


def scanned_places(tokens: int) -> range:
    """Where the parts of SCAN_TOKENS begin whose ids are looked at when a file is opened: of a large one, only some."""
    return range(0, tokens, SCAN_TOKENS * -(-tokens // MOST_SCANNED))


@dataclass(frozen=True)
class _UnscannedTokens(TokenFile):
    """Another trainer's file that is too large to be looked through at each start."""

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        ids = super().read(start, stop)
        assert self.vocab_size is not None
        _check_vocabulary(self.path, ids, vocab_size=self.vocab_size, start=start)
        return ids


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


def _check_vocabulary(path: Path, ids: npt.NDArray[Any], *, vocab_size: int, start: int) -> None:
    """ids: those from position `start` on"""
    outside = (ids >= vocab_size) | (ids < 0)
    if outside.any():
        place = int(outside.argmax())
        raise DataError(
            f"token {ids[place]} at position {start + place} of {path} is outside the vocabulary of {vocab_size}",
            fix="use the vocabulary that the file was made with (--vocab_size), its dtype (--data_dtype), or create "
            "the tokens again",
        )
