"""Memory that a state is copied to before it is written, so that training may change it meanwhile."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class Staging:
    """One buffer per tensor, made once: fresh pages cost many times what copying does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def prepare(self, tensors: dict[str, Tensor]) -> None:
        """Make the buffers and touch every page of them; for a thread, ahead of the first copy."""
        for name, tensor in tensors.items():
            buffer = self._buffer(name, tensor)
            # Not by torch: it would start OpenMP's threads a second time for this thread, and where there are more of
            # them than cores none waits actively any more, which slows every step of training.
            ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU."""
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._buffers or self._buffers[name].shape != tensor.shape:
            pin = tensor.device.type == "cuda"  # the only memory a GPU copies to without stopping
            self._buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        return self._buffers[name]
