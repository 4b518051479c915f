"""Files that are whole or not there: flushed to the disk, replaced in one go, known by their hash."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def flush(path: Path) -> None:
    """Make a file, or a folder's list of names, durable: when this returns it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half written."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
