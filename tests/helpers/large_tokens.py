"""A prepared folder that is large enough to be read in parts, and the same in a store."""

from pathlib import Path

import numpy as np

from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TOKENIZER, Manifest, TokenWriter, recorded
from helpers.object_store import ObjectStore

TOKENS = 8_500_000
"""Two bytes each: more than 16 MiB."""


def large_folder(folder: Path, *, seed: int = 0, tokens: int = TOKENS) -> Path:
    """Documents of random tokens; the validation data are small."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.train(["the beat of the drum"], vocab_size=257)
    tokenizer.save(folder / TOKENIZER)
    draw, splits, paths = np.random.default_rng(seed), {}, [folder / TOKENIZER]
    for split, documents in (("train", 85), ("valid", 1)):
        writer = TokenWriter(folder, split, vocab_size=257, end_of_text=tokenizer.end_of_text)
        for number in range(documents):
            ids = draw.integers(0, 256, tokens // 85 if split == "train" else 999, dtype=np.uint16)
            writer.add(f"{split} {number}", ids, text_bytes=len(ids))
        splits[split] = writer.close()
        paths += writer.paths
    files = recorded(paths)
    assert "train.bin.crc32" in files
    Manifest(
        drumline_version="1",
        source="random",
        source_key="s",
        key=f"k{seed}",
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        splits=splits,
        files=files,
    ).write(folder)
    return folder


def put(store: ObjectStore, folder: Path, name: str) -> None:
    """Copy a folder to the store, as bucket/name."""
    for path in folder.iterdir():
        store.objects[f"bucket/{name}/{path.name}"] = path.read_bytes()
