"""Where torch.distributed.checkpoint puts tensors: safetensors files, hashed as they are written. No pickle anywhere.

    model-00001-of-00002.safetensors       weights by their names in the model
    optimizer-00001-of-00002.safetensors   optimizer state by "kind/parameter": exp_avg/head.weight

Each rank that writes has its own number; who writes what is decided in checkpoints.py. Reading is torch's own
HuggingFaceStorageReader, which takes any number of such files and fills tensors of any sharding from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from drumline.errors import CheckpointError

SUFFIX = ".safetensors"
_DTYPES = {
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

# Each rank saves a part of its own, agreed on beforehand: what torch warns of here is what is meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FileFacts = dict[str, dict[str, Any]]
"""{file name: {"bytes": its size, "sha256": its hash}}"""


def write_tensors(
    tensors: dict[str, Tensor], folder: Path, *, part: int, parts: int, reached: Callable[[str], None]
) -> FileFacts:
    """Write one part of a checkpoint's tensors; when this returns its files are on the disk.

    reached: told the name of each file when half of it and when all of it is written
    """
    writer = _SafetensorsWriter(folder, part=part, parts=parts, reached=reached)
    with _causes():
        state_dict_saver.save(dict(tensors), storage_writer=writer, no_dist=True)
    return writer.files


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors, wherever they are, from the files of a checkpoint that has been verified."""
    with _reading(folder), _causes():
        state_dict_loader.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def stored_shapes(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """What tensors a checkpoint holds."""
    with _reading(folder):
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (about.properties.dtype, about.size) for name, about in stored.items()}  # type: ignore[union-attr]


def kind_of(name: str) -> str:
    """Which file a tensor goes to: what is called kind/parameter is the optimizer's."""
    return "optimizer" if "/" in name else "model"


@contextmanager
def _causes() -> Iterator[None]:
    """torch wraps whatever goes wrong in an exception that no `except Exception` meets: the cause instead."""
    try:
        yield
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from None


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """A file with the right hash may still hold anything: whoever made it could hash it too."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"the tensors in {folder} cannot be read ({type(error).__name__}: {error})",
            fix="resume from another checkpoint of the run",
        ) from None


class _SafetensorsWriter(StorageWriter):
    """One process's part of a checkpoint."""

    def __init__(self, folder: Path, *, part: int, parts: int, reached: Callable[[str], None]) -> None:
        self._folder, self._part, self._parts, self._reached = folder, part, parts, reached
        self.files: FileFacts = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            if item.type != WriteItemType.TENSOR:
                raise TypeError(f"{item.index.fqn} is not a whole tensor")  # anything else would be pickled
            tensors[item.index.fqn] = planner.resolve_data(item).detach().contiguous()  # type: ignore[union-attr]
        for kind in sorted({kind_of(name) for name in tensors}):
            name = f"{kind}-{self._part + 1:05d}-of-{self._parts:05d}{SUFFIX}"
            inside = {fqn: tensor for fqn, tensor in tensors.items() if kind_of(fqn) == kind}
            self.files[name] = _write(self._folder / name, inside, self._reached)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(i.index, tensors[i.index.fqn].nbytes, kind_of(i.index.fqn)) for i in plan.items])
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.files = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # torch's own writers pickle `metadata` here; the safetensors headers say all that is needed

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a part needs its number: it is never chosen by its path alone


def _write(path: Path, tensors: dict[str, Tensor], reached: Callable[[str], None]) -> dict[str, Any]:
    """A safetensors file straight from the tensors' memory: no second copy, and no lock held while the disk works."""
    # Wide types first, so that every tensor lies aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
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
