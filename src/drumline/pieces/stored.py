"""Tensors in safetensors files or in memory, whole or in pieces, read row by row: a reader takes what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from drumline.lazy import room
from drumline.pieces.rows import Range, split_name

Shapes = dict[str, tuple[torch.dtype, torch.Size]]


@dataclass(frozen=True)
class _Piece:
    start: int
    stop: int
    get: Callable[[], Any]
    """Gives it, or what has its rows: what is not read of that is not loaded."""


class Stored:
    """Tensors by name, and the rows of them that are here."""

    def __init__(self, pieces: Iterable[tuple[str, torch.dtype, torch.Size, Callable[[], Any]]]) -> None:
        """pieces: name, dtype, shape, and what gives it. ValueError: they contradict each other"""
        self.names: list[str] = []
        """Of the pieces."""
        self.shapes: Shapes = {}
        """Of whole tensors."""
        self._pieces: dict[str, list[_Piece]] = {}
        for piece, dtype, own_shape, get in pieces:
            name, rows = split_name(piece)
            start, stop, length = rows or (0, _length(own_shape), _length(own_shape))
            shape = own_shape if rows is None else torch.Size((length, *own_shape[1:]))
            if rows and (not own_shape or own_shape[0] != stop - start or stop > length):
                raise ValueError(f"{piece} has the shape {tuple(own_shape)}")
            if self.shapes.setdefault(name, (dtype, shape)) != (dtype, shape):
                raise ValueError(f"the pieces of {name} are not of the same tensor")
            self.names.append(piece)
            self._pieces.setdefault(name, []).append(_Piece(start, stop, get))
        for own in self._pieces.values():
            own.sort(key=lambda piece: (piece.start, piece.stop))

    @classmethod
    def in_files(cls, paths: Iterable[Path]) -> Stored:
        """As many files as there are; they stay open, and are read when rows are."""

        def pieces() -> Iterable[tuple[str, torch.dtype, torch.Size, Callable[[], Any]]]:
            dtypes = {name: dtype for dtype, name in room("checkpoint").DTYPES.items()}
            for path in paths:
                file: Any = safe_open(path, framework="pt")
                for name in sorted(file.keys()):
                    part = file.get_slice(name)  # nothing of the file is in memory before rows are asked for
                    shape = torch.Size(part.get_shape())
                    get = partial(file.get_slice if shape else file.get_tensor, name)
                    yield name, dtypes[part.get_dtype()], shape, get

        return cls(pieces())

    @classmethod
    def in_memory(cls, tensors: dict[str, Tensor]) -> Stored:
        each = tensors.items()
        return cls((name, tensor.dtype, tensor.shape, lambda tensor=tensor: tensor) for name, tensor in each)  # type: ignore[misc]

    def rows(self) -> dict[str, list[Range]]:
        """The rows of each tensor that are here."""
        return {name: merged((each.start, each.stop) for each in own) for name, own in self._pieces.items()}

    def check_whole(self) -> None:
        """ValueError names a tensor of which rows are missing or there twice."""
        for name, (_, shape) in self.shapes.items():
            done, length = 0, shape[0] if shape else 1
            for piece in self._pieces[name]:
                if piece.start < done:
                    raise ValueError(f"row {piece.start} of {name} is there twice")
                check_begins(name, piece.start, done)
                done = piece.stop
            check_begins(name, length, done)

    def fill(self, name: str, into: Tensor, start: int = 0) -> None:
        """Copy the rows from `start` on; into: as many as are wanted, on any device. All of them must be here."""
        stop, done = start + _length(into.shape), start
        for piece in self._pieces[name]:
            first, last = max(done, piece.start), min(stop, piece.stop)
            if first == done < last:
                there = piece.get()
                if not into.ndim:
                    into.copy_(there)
                else:
                    into[first - start : last - start].copy_(there[first - piece.start : last - piece.start])
                done = last
        if done < stop:
            raise ValueError(f"row {done} of {name} is missing")

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        dtype, shape = self.shapes[name]
        into = torch.empty(shape, dtype=dtype)
        self.fill(name, into)
        return into


def shapes_as_json(shapes: Shapes) -> list[Any]:
    return [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in shapes.items()]


def shapes_from_json(listed: list[Any]) -> Shapes:
    return {name: (getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in listed}


def _length(shape: torch.Size) -> int:
    return shape[0] if shape else 1


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same rows in as few ranges as there can be."""
    few: list[Range] = []
    for start, stop in sorted(ranges):
        if few and start <= few[-1][1]:
            few[-1] = few[-1][0], max(few[-1][1], stop)
        else:
            few.append((start, stop))
    return few


def check_begins(name: str, start: int, done: int) -> None:
    if start > done:
        raise ValueError(f"row {done} of {name} is missing")
