"""Safetensors files: read one tensor at a time, and written one tensor at a time, hashed and read back."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drumline.errors import CheckpointError
from drumline.files import file_sha256, flush
from drumline.huggingface.tensors import Mapped

SUFFIX = ".safetensors"
INDEX = f"model{SUFFIX}.index.json"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""What weights may be stored as, and what safetensors calls it."""
_CHUNK_BYTES = 16 << 20


class StoredTensors:
    """The tensors in some safetensors files; each is read when it is asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        """As safetensors calls them."""
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (it is no dict)
                        about = file.get_slice(name)
                        self._files[name] = path
                        self.shapes[name] = tuple(about.get_shape())
                        self.dtypes[name] = about.get_dtype()
            except Exception as error:  # of the library's own kind, for anything that is wrong with a file
                raise CheckpointError(
                    f"{path} is damaged, or no safetensors file ({error})", fix="copy or download it again"
                ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except Exception as error:  # gone since, as a checkpoint of a run that goes on
            raise CheckpointError(
                f"{name} in {self._files[name]} cannot be read ({error})", fix="run the same command again"
            ) from None


@dataclass(frozen=True)
class Shard:
    """One file of weights."""

    name: str
    tensors: tuple[Mapped, ...]

    def bytes(self, dtype: torch.dtype) -> int:
        return sum(_bytes(each, dtype) for each in self.tensors)


def shards(tensors: Sequence[Mapped], dtype: torch.dtype, *, largest_bytes: int, numbered: bool = False) -> list[Shard]:
    """The files for these tensors, each as large as allowed; a tensor that is larger has a file of its own.

    numbered: even a single file has a number in its name
    """
    parts: list[list[Mapped]] = [[]]
    for each in tensors:
        if parts[-1] and sum(_bytes(one, dtype) for one in (*parts[-1], each)) > largest_bytes:
            parts.append([])
        parts[-1].append(each)
    names = [f"model-{number:05d}-of-{len(parts):05d}{SUFFIX}" for number in range(1, len(parts) + 1)]
    if len(parts) == 1 and not numbered:
        names = [f"model{SUFFIX}"]
    return [Shard(name, tuple(part)) for name, part in zip(names, parts, strict=True)]


def write_shards(
    every: Sequence[Shard],
    folder: Path,
    dtype: torch.dtype,
    *,
    read: Callable[[Mapped], Tensor | None],
    indexed: bool = True,
) -> dict[str, str]:
    """Write the files, and an index if there are several; gives the sha256 of each, read back from the disk.

    read: our tensor for each; None if we have none
    """
    sha256s = {shard.name: _write(shard, folder / shard.name, dtype, read) for shard in every}
    for name, sha256 in sha256s.items():
        if file_sha256(folder / name) != sha256:
            raise CheckpointError(
                f"{folder / name} has other bytes than those that were written", fix="check the disk, and try again"
            )
    if indexed and len(every) > 1:
        index = {
            "metadata": {"total_size": sum(shard.bytes(dtype) for shard in every)},
            "weight_map": {name: shard.name for shard in every for each in shard.tensors for name in each.theirs},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sha256s


def _bytes(each: Mapped, dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for length in each.shape:
        size *= length
    return size


def _write(shard: Shard, path: Path, dtype: torch.dtype, read: Callable[[Mapped], Tensor | None]) -> str:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        content = _content(shard, dtype, read)
        while chunk := next(content, None):
            file.write(chunk)
            digest.update(chunk)
            del chunk  # with it goes its tensor, before the next one is read
        file.flush()
        os.fsync(file.fileno())
    flush(path.parent)
    return digest.hexdigest()


def _content(shard: Shard, dtype: torch.dtype, read: Callable[[Mapped], Tensor | None]) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for each in shard.tensors:
        for name, shape in zip(each.theirs, each.their_shapes, strict=True):
            start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            stored = DTYPES[str(dtype).removeprefix("torch.")]
            header[name] = {"dtype": stored, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for each in shard.tensors:
        yield from _chunks(each.to_theirs(read(each)), dtype)


def _chunks(tensors: list[Tensor], dtype: torch.dtype) -> Iterator[memoryview]:
    """Their bytes. A function of its own: when the next tensor is read, these are gone."""
    for tensor in tensors:
        data = memoryview(tensor.to(dtype).reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        yield from (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))
