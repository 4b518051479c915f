"""Forward and backward of a micro-batch as a CUDA graph: captured once, then replayed.

Launching a step's hundreds of kernels one by one keeps the host busy for as long as a fast GPU needs to run them, and
after each step, when the host has read the loss, the GPU idles until enough kernels of the next one are launched. A
replay is one launch. It computes the same on the same tensors: a batch is copied to where the captured one was. And it
is launched before the previous step's loss is read, so that the GPU never idles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drumline.kernels.gpt import Float8GPT, FusedGPT
from drumline.model import GPT
from drumline.parallel import Plain, Stopwatch, Strategy
from drumline.train import Backward, to_device

WARM_UPS = 3
"""Micro-batches of one shape before capture: kernels are compiled and libraries initialized on first use."""
_MOST_MEMORY = 0.6
"""Fraction of GPU memory. A graph keeps its memory, so evaluation and the optimizer need space besides it; and a step
that uses most of the memory is long enough to hide its launches."""

Shapes = tuple[tuple[int, ...] | None, ...]


def with_graphs(backward: Backward, model: nn.Module, strategy: Strategy) -> Backward:
    """Replay captured micro-batches if possible: a single process, drumline's own model, CUDA.

    Python code in the forward of a custom model would not run again during a replay.
    """
    ours = isinstance(model, GPT) and type(model) in (GPT, FusedGPT, Float8GPT) and not model.config.dropout
    precision = backward.precision
    on_gpu = precision.device.type == "cuda" and not precision.scaler.is_enabled()
    return RecordedBackward(backward) if ours and on_gpu and type(strategy) is Plain else backward


class RecordedBackward(Backward):
    """Runs eagerly whatever is not captured."""

    runs_ahead = True

    def __init__(self, plain: Backward) -> None:
        super().__init__(plain.objective, plain.precision, plain.weight, plain.scale)
        self._shapes: Shapes = ()
        self._times = 0
        self._recording: Recording | None = None

    @property
    def is_recorded(self) -> bool:
        """Whether the next micro-batch, if it has the shape of the last one, will be replayed."""
        return self._recording is not None

    def __call__(self, model: nn.Module, batch: tuple[Tensor | None, ...], watch: Stopwatch | None = None) -> Tensor:
        shapes = tuple(None if part is None else tuple(part.shape) for part in batch)
        if shapes != self._shapes:
            if self._recording is not None:
                torch.cuda.synchronize()  # it may still be running
            self._shapes, self._times, self._recording = shapes, 0, None
        self._times += 1
        if self._recording is None and self._times > WARM_UPS and _worth_recording(model, batch):
            self._recording = Recording(model, self, batch)
        recording = self._recording
        return super().__call__(model, batch, watch) if recording is None else recording.replay(batch)


def _worth_recording(model: nn.Module, batch: tuple[Tensor | None, ...]) -> bool:
    """Whether it can be captured: there must be no gradients yet, and masks of documents take the kernels."""
    device = next(model.parameters()).device
    room = torch.cuda.get_device_properties(device).total_memory
    fits = torch.cuda.max_memory_allocated(device) < _MOST_MEMORY * room
    masks = batch[2] is None or (isinstance(model, FusedGPT) and model.is_fused(device, torch.bfloat16))
    return fits and masks and all(p.grad is None for p in model.parameters())


class Recording:
    """Forward and backward of one micro-batch, with their input and output tensors."""

    def __init__(self, model: nn.Module, backward: Backward, batch: tuple[Tensor | None, ...]) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._batch: tuple[Tensor | None, ...] = to_device(batch, backward.precision.device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # left by the first micro-batches: a graph has its own memory pool
        self._graph = torch.cuda.CUDAGraph()
        # The saver's thread may be working in parallel; its calls are not part of the graph.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = backward.loss(model, self._batch)
            self._gradients = torch.autograd.grad(self._loss, self._parameters, allow_unused=True)
            self._loss = self._loss.detach().float()

    def replay(self, batch: tuple[Tensor | None, ...]) -> Tensor:
        """Like backward itself: accumulates into existing gradients."""
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
