"""Steps as CUDA graphs: captured once for each shape, then replayed with one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from drumline.decoding.sampling import Kind
from drumline.decoding.state import State
from drumline.decoding.step import Step

FEWEST_POSITIONS = 256


class Replayed:
    """A step that is captured for a power of two of texts and of positions."""

    def __init__(self, step: Step, state: State) -> None:
        self._step, self._state = step, state
        self._graphs: dict[tuple[int, int, Kind], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, texts: int, positions: int, kind: Kind) -> Tensor:
        """The logits are overwritten by the next replay."""
        shape = texts, positions, kind
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(*shape)
        graph, logits = self._graphs[shape]
        graph.replay()
        return logits

    def _capture(self, texts: int, positions: int, kind: Kind) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        ready = self._state.ready.clone()
        self._state.ready.fill_(False)  # then a step writes only what the next one writes again
        self._step(texts, positions, kind)  # compiles kernels, and initializes libraries
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(texts, positions, kind)
        self._state.ready.copy_(ready)
        return graph, logits


def rounded(texts: int, positions: int, *, slots: int, most: int) -> tuple[int, int]:
    """The next powers of two: few graphs, of which none computes or reads more than twice what is needed."""
    return min(_power(texts), slots), min(max(FEWEST_POSITIONS, _power(positions)), most)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
