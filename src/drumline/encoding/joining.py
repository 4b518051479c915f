"""Parts -> the files of a prepared folder: one after the other, in the order of the text."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from drumline.data import Meter, ProgressCallback, SplitRecord, token_dtype
from drumline.encoding.journal import PART, Part
from drumline.errors import DataError

_COPIED_BYTES = 8 << 20


def joined(
    parts: Iterable[Part], folder: Path, *, vocab_size: int, progress: ProgressCallback
) -> tuple[dict[str, SplitRecord], list[Path]]:
    """Write the files of all parts to a folder: what each split has, and the files."""
    parts = list(parts)
    names = sorted(path.name for path in parts[0].path.iterdir() if path.name != PART)
    meter = Meter("joining", progress, text_limit=sum(part.text_bytes for part in parts))
    splits = {label: SplitRecord(tokens=0, documents=0, text_bytes=0) for label in parts[0].splits}
    for part in parts:
        _check(part, vocab_size)
        for name in names:
            label, _, kind = name.partition(".")
            if kind == "json":  # the same in each
                shutil.copyfile(part.path / name, folder / name)
            elif kind == "documents.bin":
                ends = np.fromfile(part.path / name, dtype="<u8") + np.uint64(splits[label].tokens)
                with open(folder / name, "ab") as file:
                    file.write(ends.astype("<u8", copy=False).tobytes())
            else:
                with open(part.path / name, "rb") as source, open(folder / name, "ab") as file:
                    shutil.copyfileobj(source, file, _COPIED_BYTES)
        splits = {label: _sum(split, part.splits[label]) for label, split in splits.items()}
        meter.on_text(part.text_bytes)
    meter.report()
    return splits, [folder / name for name in names]


def _sum(a: SplitRecord, b: SplitRecord) -> SplitRecord:
    return SplitRecord(a.tokens + b.tokens, a.documents + b.documents, a.text_bytes + b.text_bytes)


def _check(part: Part, vocab_size: int) -> None:
    """A disk may lose what it said was written; hashes are taken of the whole."""
    width = np.dtype(token_dtype(vocab_size)).itemsize
    for label, split in part.splits.items():
        sizes = {"bin": split.tokens * width, "documents.bin": split.documents * 8}
        if any((part.path / f"{label}.{kind}").stat().st_size != size for kind, size in sizes.items()):
            raise DataError(
                f"{part.path} is damaged: its files have other sizes than were written",
                fix=f"remove {part.path.parent.parent} and run the same command again",
            )
