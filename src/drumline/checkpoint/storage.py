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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SUFFIX = ".safetensors"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_CHUNK_BYTES = 16 << 20

FileFacts = dict[str, dict[str, Any]]
"""{file name: {"bytes": its size, "sha256": its hash}}"""


def kind_of(name: str) -> str:
    """The file of a tensor: names of the form kind/parameter belong to the optimizer."""
    return "optimizer" if "/" in name else "model"


def write_tensors(
    tensors: dict[str, Tensor], folder: Path, *, part: int, parts: int, reached: Callable[[str], None]
) -> FileFacts:
    """Write one part of a checkpoint's tensors; when this returns, its files are on disk.

    reached: called with the name of each file when half of it and when all of it is written
    """
    files: FileFacts = {}
    for kind in sorted({kind_of(name) for name in tensors}):
        file = f"{kind}-{part + 1:05d}-of-{parts:05d}{SUFFIX}"
        inside = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if kind_of(name) == kind}
        files[file] = _write(folder / file, inside, reached)
    return files


def _write(path: Path, tensors: dict[str, Tensor], reached: Callable[[str], None]) -> dict[str, Any]:
    """Write a safetensors file directly from the tensors' memory: no second copy, and without holding the GIL."""
    # Wide dtypes first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in _chunks(struct.pack("<Q", len(text)) + text, [tensor for _, tensor in ordered]):
            file.write(chunk)
            digest.update(chunk)
            before, written = written, written + len(chunk)
            if before <= end // 2 < written:
                reached(f"half of {path.name}")
        file.flush()
        os.fsync(file.fileno())
    reached(path.name)
    return {"bytes": written, "sha256": digest.hexdigest()}


def _chunks(header: bytes, tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]
