"""Tensors in safetensors files, hashed as they are written. No pickle anywhere.

    model-00001-of-00002.safetensors       weights by their names in the model
    optimizer-00001-of-00002.safetensors   optimizer state by "kind/parameter": exp_avg/head.weight

Each rank that writes has its own number; parts.py decides which rank writes what. restoring.py reads any number of such
files.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUFFIX = ".safetensors"
_NAMES = """
float64:F64 float32:F32 float16:F16 bfloat16:BF16 float8_e4m3fn:F8_E4M3 float8_e5m2:F8_E5M2 complex64:C64
int64:I64 int32:I32 int16:I16 int8:I8 uint64:U64 uint32:U32 uint16:U16 uint8:U8 bool:BOOL
"""
DTYPES: dict[torch.dtype, str] = {getattr(torch, ours): name for ours, name in (w.split(":") for w in _NAMES.split())}
_CHUNK_BYTES = 128 << 20
"""Written and hashed at once: threads that often come back to Python hold up the one that trains, and it them."""

Reached = Callable[[str], None]
FileFacts = dict[str, dict[str, Any]]
"""{file name: {"bytes": its size, "sha256": its hash}}"""


def kind_of(name: str) -> str:
    """The file of a tensor: names of the form kind/parameter belong to the optimizer."""
    return "optimizer" if "/" in name else "model"


def write_tensors(tensors: dict[str, Tensor], folder: Path, *, part: int, parts: int, reached: Reached) -> FileFacts:
    """Write one part of a checkpoint's tensors; when this returns, its files are on disk. parts.py is faster.

    reached: called with the name of each file when half of it and when all of it is written
    """
    contents = contents_of(tensors, folder, part=part, parts=parts)
    with ThreadPoolExecutor() as threads:  # a slow disk flushes two files in the time of one
        sizes = threads.map(lambda path: write_file(path, contents[path], reached), contents)
        return {p.name: {"bytes": n, "sha256": sha256_of(contents[p])} for p, n in zip(contents, sizes, strict=True)}


def contents_of(
    tensors: dict[str, Tensor], folder: Path, *, part: int, parts: int, files: int = 1
) -> dict[Path, list[memoryview]]:
    """Each file of a part, with its content. files: of each kind and part"""
    inside: dict[Path, dict[str, Tensor]] = {}
    ends = dict.fromkeys(("model", "optimizer"), 0)
    totals = {kind: sum(tensor.nbytes for name, tensor in tensors.items() if kind_of(name) == kind) for kind in ends}
    for name, tensor in tensors.items():
        kind = kind_of(name)
        number = part * files + ends[kind] * files // max(1, totals[kind]) + 1
        ends[kind] += tensor.nbytes
        path = folder / f"{kind}-{number:05d}-of-{parts * files:05d}{SUFFIX}"
        inside.setdefault(path, {})[name] = tensor.detach().contiguous()
    return {path: _content(own) for path, own in sorted(inside.items())}


def _content(tensors: dict[str, Tensor]) -> list[memoryview]:
    """A safetensors file, in chunks of the tensors' own memory: no second copy."""
    # Wide dtypes first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    chunks = [memoryview(struct.pack("<Q", len(text)) + text)]
    for _, tensor in ordered:
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        chunks += [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
    return chunks


def sha256_of(chunks: list[memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def write_file(path: Path, chunks: list[memoryview], reached: Reached) -> int:
    """Write and flush a file; gives its size."""
    size, written = sum(map(len, chunks)), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            file.flush()
            before, written = written, written + len(chunk)
            if before <= size // 2 < written:
                reached(f"half of {path.name}")
        os.fsync(file.fileno())
    reached(path.name)
    return size
