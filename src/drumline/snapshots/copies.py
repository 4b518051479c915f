"""Copies of a run's tensors that training does not change any more.

On a GPU with room for it, the tensors are first copied there, which takes milliseconds, and a thread brings that copy
to the host over a stream of its own while training goes on. Without room they are copied to the host directly, and
training waits. On a CPU the copy to the host is the only one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from drumline.snapshots.layout import Layout
from drumline.snapshots.memory import Memory
from drumline.snapshots.sums import sums
from drumline.units import count

_PIECE_BYTES = 32 << 20
"""At once over PCIe: other copies, such as that of a step's loss, wait for the one that is under way."""
_SPARED_BYTES = 2 << 30
"""What is left free on a GPU: evaluation, and libraries on first use, take more memory later."""


def has_room(copied_bytes: int, free_bytes: int) -> bool:
    """Whether copies of so many bytes are made on a GPU that has so many free."""
    return free_bytes >= copied_bytes + _SPARED_BYTES


class Copies:
    """One per process, used by one thread; what `to` returns is called in any."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        """As training has them, or copies on the device."""
        self._layout, self._flat = Layout({}, 0), torch.empty(0)
        self._on_device: dict[str, Tensor] = {}
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._under_way, self._changed = 0, threading.Condition()
        self.device_s = 0.0
        """How long the device copied within its own memory, the last time."""

    def prepare(self, tensors: dict[str, Tensor]) -> str | None:
        """Take memory on the device for copies of these tensors; if there is not enough, says what it would take."""
        large = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        if not large or self._on_device:
            return None
        layout = Layout.of(large)
        with torch.cuda.device(self._device):
            free = torch.cuda.mem_get_info(self._device)[0]
            if not has_room(layout.size, free):
                return f"{count(layout.size)}B more on the GPU, where {count(free)}B are free"
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                memory = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        self._stream, self._on_device, self._layout, self._flat = stream, layout.views(memory), layout, memory
        return None

    def is_free(self) -> bool:
        """Whether `take` would not wait: nothing is on its way to the host."""
        return self._under_way == 0

    def take(self, tensors: dict[str, Tensor]) -> None:
        """The tensors as they are now are what `to` copies; until the next `take`."""
        with self._changed:
            self._changed.wait_for(self.is_free)
        copied = {name: tensor for name, tensor in tensors.items() if name in self._on_device}
        self._tensors = {**tensors, **{name: self._on_device[name] for name in copied}}
        if copied:
            stream = torch.cuda.current_stream(self._device)
            self._events = _event(), _event()
            self._events[0].record(stream)
            torch._foreach_copy_([self._on_device[name] for name in copied], list(copied.values()))
            self._events[1].record(stream)

    def to(self, layout: Layout, host: Tensor, *, with_sums: bool = False) -> Callable[[], list[list[int]] | None]:
        """Copy some of them to uint8 memory on the host. They are there when what this returns has been called.

        with_sums: that call gives the sums of what was on the device, if they are one piece of its memory there
        """
        later = [name for name in layout.tensors if name in self._on_device]
        for name, view in layout.views(host, layout.tensors.keys() - later).items():
            view.copy_(self._tensors[name], non_blocking=self._device.type == "cuda")
        if not later:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return lambda: None
        with self._changed:
            self._under_way += 1
        return lambda: self._bring(layout, later, host, with_sums=with_sums)

    def _bring(self, layout: Layout, names: list[str], host: Tensor, *, with_sums: bool) -> list[list[int]] | None:
        assert self._stream is not None and self._events is not None
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(self._events[1])
                in_one = layout.on_device if layout.begins(self._layout) else 0
                summed = sums(self._flat[:in_one], self._device) if with_sums and in_one else None
                if in_one:
                    there = torch.split(self._flat[:in_one], _PIECE_BYTES)
                    pairs = list(zip(torch.split(host[:in_one], _PIECE_BYTES), there, strict=True))
                else:
                    pairs = [(view, self._on_device[name]) for name, view in layout.views(host, names).items()]
                for on_host, on_device in pairs:
                    on_host.copy_(on_device, non_blocking=True)
                    self._stream.synchronize()  # or the loss of each step would wait until all of it is copied
                self.device_s = self._events[0].elapsed_time(self._events[1]) / 1000
                return None if summed is None else summed.tolist()
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Staging:
    """The memory on the host that a checkpoint is written from; allocated once: new pages cost more than copying."""

    def __init__(self, copies: Copies, device: torch.device) -> None:
        self._copies, self._device = copies, device
        self._layout: Layout | None = None
        self._views: dict[str, Tensor] = {}
        self._memory: Memory | None = None

    def prepare(self, layout: Layout) -> None:
        if layout != self._layout:
            self._views, self._memory = {}, None
            self._memory = Memory(max(1, layout.size), device=self._device)
            self._layout, self._views = layout, layout.views(self._memory.tensor())

    def copy(self, tensors: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """The tensors of the last `take`, on the CPU; what it returns waits until they are there."""
        self.prepare(Layout.of(tensors))
        assert self._layout is not None and self._memory is not None
        views, bring = self._views, self._copies.to(self._layout, self._memory.tensor())

        def brought() -> dict[str, Tensor]:
            bring()
            return views

        return brought
