"""Files that are known by their hashes: verified as a whole once, and in parts whenever they are read.

A file is hashed again only if its size or time has changed. A disk that returns other bytes, or a tool that puts the
time back, is noticed by the hashes of its parts, which are taken while the whole is hashed: at each start of as many
parts as a moment allows, and of every other part when it is first read.

A large file has a file of such hashes beside it (NAME.crc32), written with it: it is never hashed as a whole, so that a
terabyte is opened at once. Its parts are small, because windows are read from anywhere in it.

A file of another program has no hashes: of it, a sample is kept and compared.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from drumline.errors import DataError
from drumline.files.disk import replace_text

STAMPS = "verified.json"
PART_BYTES = 1 << 20
LARGE_PART_BYTES = 1 << 14
"""Of a file that has its hashes beside it: a terabyte has 256 MB of them. From a store, a window takes whole parts."""
parts_file = "{}.crc32".format
"""The name of the file that has the hashes of a large file's parts."""
_START_S = 0.2
_MOST_AT_START = 1000
_SAMPLED = 16
"""Parts in the sample of a file."""


@dataclass(frozen=True)
class PartHashes:
    """crc32 of each `part_bytes` of a file; the last part may be shorter."""

    crc32s: Sequence[int] | npt.NDArray[np.uint32]
    part_bytes: int

    def __len__(self) -> int:
        return len(self.crc32s)

    def is_right(self, number: int, part: bytes | memoryview) -> bool:
        return crc32(part) == int(self.crc32s[number])


def hash_parts(path: Path) -> Path:
    """Write the hashes of a large file's parts, little-endian uint32, to a file beside it; returns that file."""
    hashes = bytearray()
    with path.open("rb", buffering=LARGE_PART_BYTES * 64) as file:
        while part := file.read(LARGE_PART_BYTES):
            hashes += crc32(part).to_bytes(4, "little")
    beside = path.with_name(parts_file(path.name))
    beside.write_bytes(hashes)
    return beside


def verify(folder: Path, sha256s: Mapping[str, str], *, tokenizer: str) -> dict[str, PartHashes]:
    """The hashes of the parts of each file in a folder; DataError for a file that is not what its sha256 says.

    A file whose NAME.crc32 is among them is not hashed: its parts are compared when they are read.
    tokenizer: the name of that file
    """
    large = [name for name in sha256s if parts_file(name) in sha256s]
    sha256s = {name: sha256 for name, sha256 in sha256s.items() if name not in large}
    try:
        stamps = dict(json.loads((folder / STAMPS).read_bytes()))
    except (OSError, ValueError, TypeError):
        stamps = {}
    before = dict(stamps)
    for name, sha256 in sha256s.items():
        path = folder / name
        stat = path.stat()
        stamp = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
        if _parts_of(stamps.get(name), stamp) is None:
            what = "not the tokenizer of these tokens" if name == tokenizer else "damaged or modified"
            stamps[name] = {**stamp, "crc32": _hashed(path, sha256, otherwise=what)}
    if stamps != before:
        with suppress(OSError):  # a read-only folder works too; it is just hashed every time
            replace_text(folder / STAMPS, json.dumps(stamps, indent=2) + "\n")
    parts = {name: PartHashes(_parts_of(stamps[name], {}) or [], PART_BYTES) for name in sha256s}
    return parts | {name: _hashes_beside(folder / name) for name in large}


def _hashes_beside(path: Path) -> PartHashes:
    """Of a large file; the file that they are in is verified."""
    beside = path.with_name(parts_file(path.name))
    expected, there = -(-path.stat().st_size // LARGE_PART_BYTES) * 4, beside.stat().st_size
    if there != expected or not there:
        raise DataError(f"{beside} has {there} bytes, but {path.name} needs {expected}", fix=_fix(path))
    return PartHashes(np.memmap(beside, dtype="<u4", mode="r"), LARGE_PART_BYTES)


def _parts_of(known: Any, stamp: dict[str, Any]) -> list[int] | None:
    """The hashes that were taken when a file was verified; None if it was not, or has another stamp now."""
    with suppress(KeyError, TypeError, ValueError):
        digits = bytes.fromhex(known["crc32"])
        parts = [int.from_bytes(digits[place : place + 4]) for place in range(0, len(digits), 4)]
        if len(parts) == -(-known["bytes"] // PART_BYTES) and stamp.items() <= known.items():
            return parts
    return None


def _hashed(path: Path, sha256: str, *, otherwise: str) -> str:
    """The hashes of a file's parts, in hex digits, if the whole has this sha256.

    crc32 is by far the fastest of Python's hashes, and damage is not made to deceive.
    """
    whole, parts = hashlib.sha256(), ""
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            whole.update(part)
            parts += f"{crc32(part):08x}"
    if whole.hexdigest() != sha256:
        raise DataError(
            f"{path} is {otherwise}: sha256 {whole.hexdigest()[:12]}, but {sha256[:12]} in its manifest", fix=_fix(path)
        )
    return parts


def sampled(path: Path) -> dict[str, Any]:
    """What tells a file without hashes from others: its size, and a hash of all of it or, if it is large, of a sample.

    The sample has a part from each sixteenth, at a place that depends on the size alone: it is the same on every host.
    """
    size, hashed = path.stat().st_size, 0
    places: Sequence[int] = range(0, size, PART_BYTES)
    if len(places) > _SAMPLED:
        chosen = random.Random(size)
        places = [int((part + chosen.random()) * (size - PART_BYTES) / _SAMPLED) for part in range(_SAMPLED)]
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            hashed = crc32(file.read(PART_BYTES), hashed)
    return {"path": str(path.absolute()), "bytes": size, "crc32": f"{hashed:08x}"}


class Parts:
    """The parts of a verified file, each compared with its hash once."""

    def __init__(self, path: Path, content: memoryview, hashes: PartHashes) -> None:
        self._path, self._content, self._hashes = path, content, hashes
        self._is_checked = bytearray(len(hashes))

    def check(self, start: int, stop: int) -> None:
        """DataError if bytes start..stop-1, or others of their parts, are not those that were verified."""
        size = self._hashes.part_bytes
        for number in range(start // size, -(-stop // size)):
            if not self._is_checked[number]:
                self._check(number)

    def check_some(self) -> None:
        """All of a small file, and others of a large one at each start."""
        deadline = time.monotonic() + _START_S
        for number in random.sample(range(len(self._hashes)), min(len(self._hashes), _MOST_AT_START)):
            if time.monotonic() > deadline:
                break
            self._check(number)

    def _check(self, number: int) -> None:
        start = number * self._hashes.part_bytes
        part = self._content[start : start + self._hashes.part_bytes]
        if not self._hashes.is_right(number, part):
            raise DataError(
                f"{self._path} is damaged or modified: its bytes {start:,} to {start + len(part):,} "
                f"(part {number + 1:,} of {len(self._hashes):,}) are not those that were prepared",
                fix=_fix(self._path),
            )
        self._is_checked[number] = 1


def _fix(path: Path) -> str:
    return f"copy it again, or remove {path.parent} and run drumline prepare again"
