"""Prepared folders of any size that take no room: their tokens are holes in a file."""

import hashlib
from pathlib import Path
from zlib import crc32

import numpy as np

from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TOKENIZER, FileRecord, Manifest, SplitRecord, recorded
from drumline.files.verified import LARGE_PART_BYTES, parts_file


def sparse_folder(folder: Path, *, tokens: int, documents: int = 1) -> Path:
    """A folder with train.bin of `tokens` zeros, uint16, and documents of equal length."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.train(["the beat of the drum"], vocab_size=257)
    tokenizer.save(folder / TOKENIZER)
    size_bytes = tokens * 2
    with (folder / "train.bin").open("wb") as file:
        file.truncate(size_bytes)
    whole, rest = divmod(size_bytes, LARGE_PART_BYTES)
    hashes = np.full(whole + (rest > 0), crc32(bytes(LARGE_PART_BYTES)), dtype="<u4")
    if rest:
        hashes[-1] = crc32(bytes(rest))
    hashes.tofile(folder / parts_file("train.bin"))
    (np.arange(1, documents + 1, dtype="<u8") * (tokens // documents)).tofile(folder / "train.documents.bin")
    (folder / "train.names.txt").write_text("".join(f"{number}\n" for number in range(documents)))
    names = (TOKENIZER, "train.documents.bin", "train.names.txt", parts_file("train.bin"))
    # Nobody hashes a terabyte: its parts are compared when they are read.
    files = recorded([folder / name for name in names])
    files["train.bin"] = FileRecord(size_bytes, hashlib.sha256(b"never read as a whole").hexdigest())
    Manifest(
        drumline_version="1",
        source="holes",
        source_key="s",
        key="k",
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        splits={"train": SplitRecord(tokens, documents, tokens)},
        files=files,
    ).write(folder)
    return folder
