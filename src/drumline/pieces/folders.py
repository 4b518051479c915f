"""The tensors of a checkpoint: what is wrong with its files is an error for people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from drumline.errors import CheckpointError
from drumline.pieces.stored import Shapes, Stored


def stored_in(folder: Path, kind: str = "") -> Stored:
    """The tensors in the files of a verified checkpoint, each of them read when it is asked for. kind: of some files"""
    with reading(folder):
        stored = Stored.in_files(sorted(folder.glob(f"{kind}*.safetensors")))
        stored.check_whole()
        return stored


def stored_shapes(folder: Path) -> Shapes:
    """The tensors in a checkpoint."""
    return stored_in(folder).shapes


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors on any device from the files of a verified checkpoint."""
    stored = stored_in(folder)
    with reading(folder), torch.no_grad():
        for name, tensor in tensors.items():
            if name not in stored.shapes:
                raise KeyError(f"{name} is missing")
            if (shape := stored.shapes[name][1]) != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(shape)}, not {tuple(tensor.shape)}")
            stored.fill(name, tensor)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors into CheckpointError: a file with the right hash may still contain anything."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"the tensors in {folder} cannot be read ({type(error).__name__}: {error})",
            fix="resume from another checkpoint of the run",
        ) from None
