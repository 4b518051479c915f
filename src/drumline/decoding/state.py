"""What a step of generation reads and writes: tensors that are allocated once, so that a CUDA graph can refer to them.

Shapes: N slots, K key/value heads, P positions, W head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drumline.generate import SampleConfig
from drumline.model import GPT, LayerCache


class State:
    """All slots: their newest tokens, which the model has not read yet, what it has read, and how to sample."""

    def __init__(self, model: GPT, count: int) -> None:
        config, weight = model.config, model.token_embedding.weight
        self.device, self.positions = weight.device, config.max_position_embeddings
        shape = (config.n_layers, 2, count, config.kv_heads, config.max_position_embeddings, config.head_width)
        # Zeros: a mask hides what is beyond a text's end, but not a NaN, which unused memory may hold.
        self.cache = weight.new_zeros(shape)
        self.ids, self.previous, self.lengths, self.draws, self.seeds = (
            torch.zeros(count, dtype=torch.int64, device=self.device) for _ in range(5)
        )
        """The newest token and the one before it, tokens in the cache, and tokens sampled so far: int64 (N)."""
        self.ready = torch.zeros(count, dtype=torch.bool, device=self.device)
        """Whose texts go on in the next step."""
        self.temperatures, self.top_ps = (torch.zeros(count, dtype=torch.float32, device=self.device) for _ in range(2))
        self.top_ks = torch.full((count,), ALL, dtype=torch.int64, device=self.device)

    @property
    def per_slot(self) -> tuple[Tensor, ...]:
        """All but the cache."""
        numbers = (self.ids, self.previous, self.lengths, self.draws, self.seeds)
        return (*numbers, self.temperatures, self.top_ps, self.top_ks)

    def move(self, source: int, target: int, length: int) -> None:
        """Let a slot have what another one has."""
        self.cache[:, :, target, :, :length] = self.cache[:, :, source, :, :length]
        for tensor in self.per_slot:
            tensor[target] = tensor[source]

    def begin(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], settings: Sequence[SampleConfig], draws: list[int]
    ) -> Tensor:
        """Set what slots need beside their caches; returns the slots as a tensor, int64 (R)."""
        numbers = [(*prompt[-1:], len(prompt), draw) for prompt, draw in zip(prompts, draws, strict=True)]
        chosen = [
            (_signed(each.seed), vocabulary_if_none(each.top_k), 0 if each.top_k == 1 else each.temperature, each.top_p)
            for each in settings
        ]
        packed = self.sent(
            [[slot, *a, b[0], b[1]] for slot, a, b in zip(slots, numbers, chosen, strict=True)], torch.int64
        )
        factors = self.sent([[b[2], 1.0 if b[3] is None else b[3]] for b in chosen], torch.float32)
        where = packed[:, 0]
        for column, tensor in enumerate((self.previous, self.lengths, self.draws, self.seeds, self.top_ks), 1):
            tensor[where] = packed[:, column]
        for column, tensor in enumerate((self.temperatures, self.top_ps)):
            tensor[where] = factors[:, column]
        return where

    def sent(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """A tensor on the device, without waiting for what is running there."""
        there = self.device.type == "cuda"
        return torch.tensor(values, dtype=dtype, pin_memory=there).to(self.device, non_blocking=True)


ALL = 2**31 - 1
"""top_k that leaves every token."""


def vocabulary_if_none(top_k: int | None) -> int:
    return ALL if top_k is None else top_k


def _signed(seed: int) -> int:
    """The same 64 bits as int64 has them."""
    seed %= 1 << 64
    return seed - (1 << 64) if seed >= 1 << 63 else seed


class PromptLayer(LayerCache):
    """One layer of the cache, to which the keys and values of several new texts are written."""

    def __init__(self, room: Tensor, slots: Tensor) -> None:
        """room: (2, N, K, P, W); slots: int64 (R)"""
        self._room, self._slots, self.length = room, slots, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """2 x (R, K, T, W). A shorter text's padding is overwritten before anything attends to it."""
        keys, values = self._room
        keys[self._slots, :, : k.size(2)] = k
        values[self._slots, :, : v.size(2)] = v
        return k, v


class StepLayer(LayerCache):
    """One layer of the cache in a step: a new token of each of the first slots, at a place of its own."""

    def __init__(self, room: Tensor, rows: Tensor, places: Tensor, longest: int) -> None:
        """room: (2, N, K, P, W); rows, places: int64 (B)"""
        self._room, self._rows, self._places, self._longest = room, rows, places, longest

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """2 x (B, K, 1, W) -> views of 2 x (B, K, longest, W)"""
        keys, values = self._room[:, : len(k)]
        keys[self._rows, :, self._places] = k[:, :, 0]
        values[self._rows, :, self._places] = v[:, :, 0]
        return keys[:, :, : self._longest], values[:, :, : self._longest]
