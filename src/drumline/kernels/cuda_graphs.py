"""Forward and backward of a micro-batch as a CUDA graph: recorded once, then replayed.

Launched one by one, a step's hundreds of kernels keep the host busy for as long as a fast GPU needs to run them, and
after each step, when the host has read the loss, the GPU waits until enough of the next are launched. A replay is one
launch. It computes the same, on the same tensors: a batch is copied to where the recorded one lay. And it is launched
before the loss of the step before it is read, so that the GPU does not wait at all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drumline.kernels.gpt import Float8GPT, FusedGPT
from drumline.model import GPT
from drumline.parallel import Plain, Stopwatch, Strategy
from drumline.train import Backward, to_device

WARM_UPS = 3
"""Micro-batches of one shape before it is recorded: kernels are compiled and libraries set up at their first uses."""
_MOST_MEMORY = 0.6
"""Of the GPU's. A recording keeps what it computes with, so that evaluating and the optimizer need room beside it; and
a step that takes most of the memory is long enough for its launches."""

Shapes = tuple[tuple[int, ...] | None, ...]


def with_graphs(backward: Backward, model: nn.Module, strategy: Strategy) -> Backward:
    """The same by recorded micro-batches, where that can be done: one process, drumline's own model on CUDA.

    What Python does in the forward of a model that somebody else wrote would not be done again.
    """
    ours = isinstance(model, GPT) and type(model) in (GPT, FusedGPT, Float8GPT) and not model.config.dropout
    precision = backward.precision
    on_gpu = precision.device.type == "cuda" and not precision.scaler.is_enabled()
    return RecordedBackward(backward) if ours and on_gpu and type(strategy) is Plain else backward


class RecordedBackward(Backward):
    """Whatever is not recorded runs as it is."""

    runs_ahead = True

    def __init__(self, plain: Backward) -> None:
        super().__init__(plain.objective, plain.precision, plain.weight, plain.scale)
        self._shapes: Shapes = ()
        self._times = 0
        self._recording: Recording | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the next micro-batch, if it has the shape of the last, is replayed."""
        return self._recording is not None

    def __call__(self, model: nn.Module, batch: tuple[Tensor | None, ...], watch: Stopwatch | None = None) -> Tensor:
        shapes = tuple(None if part is None else tuple(part.shape) for part in batch)
        if shapes != self._shapes:
            if self._recording is not None:
                torch.cuda.synchronize()  # it may still be replayed
            self._shapes, self._times, self._recording = shapes, 0, None
        self._times += 1
        if self._recording is None and self._times > WARM_UPS and _worth_recording(model, batch):
            self._recording = Recording(model, self, batch)
        return super().__call__(model, batch, watch) if self._recording is None else self._recording.replay(batch)


def _worth_recording(model: nn.Module, batch: tuple[Tensor | None, ...]) -> bool:
    """Whether it can be: masks of documents depend on what the host reads, and no gradients may be there yet."""
    device = next(model.parameters()).device
    room = torch.cuda.get_device_properties(device).total_memory
    fits = torch.cuda.max_memory_allocated(device) < _MOST_MEMORY * room
    return fits and batch[-1] is None and all(p.grad is None for p in model.parameters())


class Recording:
    """One micro-batch's forward and backward, with the tensors that they read and write."""

    def __init__(self, model: nn.Module, backward: Backward, batch: tuple[Tensor | None, ...]) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._batch: tuple[Tensor | None, ...] = to_device(batch, backward.precision.device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the first micro-batches left: a recording has memory of its own
        self._graph = torch.cuda.CUDAGraph()
        # Beside this thread one of the saver's may be at work, whose calls are no part of this.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = backward.loss(model, self._batch)
            self._gradients = torch.autograd.grad(self._loss, self._parameters, allow_unused=True)
            self._loss = self._loss.detach().float()

    def replay(self, batch: tuple[Tensor | None, ...]) -> Tensor:
        """As backward itself: gradients that are there already are added to."""
        before = [p.grad.clone() for p in self._parameters if p.grad is not None]
        for there, new in zip(self._batch, batch, strict=True):
            if there is not None and new is not None:
                there.copy_(new.pin_memory(), non_blocking=True)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        if before:
            torch._foreach_add_([gradient for gradient in self._gradients if gradient is not None], before)
        return self._loss.clone()
