"""Where each tensor lies in one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 256


@dataclass(frozen=True)
class Layout:
    """Tensors by name, one after the other."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int]]
    """dtype, shape and first byte"""
    size: int
    """in bytes"""
    on_device: int = 0
    """Bytes at the beginning, of tensors that are on a GPU."""

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Layout:
        end, on_device, places = 0, 0, {}
        for name, tensor in sorted(tensors.items(), key=lambda item: not item[1].is_cuda):
            places[name] = tensor.dtype, tuple(tensor.shape), end
            end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
            on_device = end if tensor.is_cuda else on_device
        return cls(places, end, on_device)

    def begins(self, other: Layout) -> bool:
        """Whether the tensors of a GPU are the first ones of the other layout, at the same places."""
        own = {name: place for name, place in self.tensors.items() if place[2] < self.on_device}
        return all(other.tensors.get(name) == place for name, place in own.items())

    def views(self, memory: Tensor, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The tensors, or some of them, in a uint8 tensor that has room for all."""
        places = ((name, self.tensors[name]) for name in (self.tensors if names is None else names))
        return {
            name: memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (dtype, shape, start) in places
        }

    def as_json(self) -> dict[str, Any]:
        return {
            name: [str(dtype).removeprefix("torch."), shape, start]
            for name, (dtype, shape, start) in self.tensors.items()
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any], size: int) -> Layout:
        """ValueError, TypeError or AttributeError if it is not one, or does not fit in so many bytes."""
        tensors = {}
        for name, (dtype, shape, start) in stored.items():
            kind = getattr(torch, dtype)
            end = start + math.prod(shape) * kind.itemsize
            if not isinstance(kind, torch.dtype) or not 0 <= start <= end <= size:
                raise ValueError(f"{name} is not in it")
            tensors[name] = kind, tuple(shape), start
        return cls(tensors, size)
