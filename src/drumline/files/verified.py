"""Files that are known by their hashes: verified as a whole once, and in parts whenever they are read.

A file is hashed again only if its size or time has changed. A disk that returns other bytes, or a tool that puts the
time back, is noticed by the hashes of its parts, which are taken while the whole is hashed: at each start of as many
parts as a moment allows, and of every other part when it is first read.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from drumline.errors import DataError
from drumline.files.disk import replace_text

STAMPS = "verified.json"
PART_BYTES = 1 << 20
_START_S = 0.2
_MOST_AT_START = 1000


def verify(folder: Path, sha256s: Mapping[str, str], *, tokenizer: str) -> dict[str, list[int]]:
    """The hashes of the parts of each file in a folder; DataError for a file that is not what its sha256 says.

    tokenizer: the name of that file
    """
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
    return {name: _parts_of(stamps[name], {}) or [] for name in sha256s}


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


class Parts:
    """The parts of a verified file, each compared with its hash once."""

    def __init__(self, path: Path, content: memoryview, hashes: list[int]) -> None:
        self._path, self._content, self._hashes = path, content, hashes
        self._unchecked = set(range(len(hashes)))

    def check(self, start: int, stop: int) -> None:
        """DataError if bytes start..stop-1, or others of their parts, are not those that were verified."""
        if self._unchecked:
            for number in range(start // PART_BYTES, -(-stop // PART_BYTES)):
                if number in self._unchecked:
                    self._check(number)

    def check_some(self) -> None:
        """All of a small file, and others of a large one at each start."""
        deadline = time.monotonic() + _START_S
        for number in random.sample(range(len(self._hashes)), min(len(self._hashes), _MOST_AT_START)):
            if time.monotonic() > deadline:
                break
            self._check(number)

    def _check(self, number: int) -> None:
        start = number * PART_BYTES
        part = self._content[start : start + PART_BYTES]
        if crc32(part) != self._hashes[number]:
            raise DataError(
                f"{self._path} is damaged or modified: its bytes {start:,} to {start + len(part):,} "
                f"(part {number + 1:,} of {len(self._hashes):,}) are not those that were prepared",
                fix=_fix(self._path),
            )
        self._unchecked.discard(number)


def _fix(path: Path) -> str:
    return f"copy it again, or remove {path.parent} and run drumline prepare again"
