"""A step of generation in plain PyTorch: each text's newest token is read, and the next one sampled.

It reads and writes only tensors of the state, and looks at none of their values, so it can be captured as a CUDA graph.

Shapes: B texts, which are those in the first slots, L positions attended to, V vocabulary, W head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from drumline.decoding.sampling import Kind, choose_tokens
from drumline.decoding.state import State, StepLayer
from drumline.model import GPT

Step = Callable[[int, int, Kind], Tensor]
"""(texts, positions, kind) -> their logits, float (B, V), after the state has been updated."""


class PlainStep:
    """vocabulary: tokens that may be sampled, the first ones"""

    def __init__(self, model: GPT, state: State, *, vocabulary: int) -> None:
        self._model, self._state, self._vocabulary = model, state, vocabulary

    def __call__(self, texts: int, positions: int, kind: Kind) -> Tensor:
        logits = self._logits(texts, positions)
        state = self._state
        token = choose(logits, kind, state, slice(0, texts))
        ready = state.ready[:texts]
        state.previous[:texts] = torch.where(ready, state.ids[:texts], state.previous[:texts])
        state.ids[:texts] = torch.where(ready, token, state.ids[:texts])
        state.lengths[:texts] += ready
        state.draws[:texts] += ready
        return logits

    def _logits(self, texts: int, positions: int) -> Tensor:
        model, state = self._model, self._state
        ids = state.ids[:texts, None]  # (B, 1)
        places = state.lengths[:texts].clamp(max=positions - 1)  # (B); of slots that are not in use, anything
        x = model.look_up(ids, model.token_embedding.weight)  # (B, 1, D)
        if model.smear is not None:
            before = model.look_up(state.previous[:texts, None], model.token_embedding.weight)
            x = x + model.smear.type_as(x) * before
        if model.position_embedding is not None:
            x = x + model.position_embedding(places)[:, None]
        rope = None if model.rope is None else model.rope[:, places, None, None]  # (2, B, 1, 1, W / 2)
        rows = torch.arange(texts, device=state.device)
        mask = (torch.arange(positions, device=state.device) <= places[:, None])[:, None, None]  # (B, 1, 1, L)
        extra_values = model.extra_values(ids)
        for layer, block in enumerate(model.blocks):
            x = block(x, rope, mask, StepLayer(state.cache[layer], rows, places, positions), extra_values.get(layer))
        return model.logits(model.final_norm(x)[:, -1])[:, : self._vocabulary]


def choose(logits: Tensor, kind: Kind, state: State, slots: Tensor | slice) -> Tensor:
    """A token for each of some slots: (B, V) -> int64 (B)"""
    return choose_tokens(
        logits,
        kind,
        seeds=state.seeds[slots],
        draws=state.draws[slots],
        temperatures=state.temperatures[slots],
        top_ks=state.top_ks[slots],
        top_ps=state.top_ps[slots],
    )
