"""What several texts that grow at the same time have read so far: one slot for each.

Shapes: A slots in use, which are always the first ones, T tokens in this call, L the longest text, V vocabulary,
D d_model, K key/value heads, W head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from drumline.errors import ConfigError
from drumline.model import GPT, KVCache, LayerCache

_AT_ONCE = 64
"""Positions by which the memory in use grows."""


class Slots(Protocol):
    """Slots 0 to count - 1. A text's logits do not depend on what is in the other slots."""

    count: int

    def clear(self, slot: int) -> None:
        """Begin a new text."""

    def move(self, source: int, target: int) -> None:
        """Let `target` hold what `source` holds."""

    def read(self, slot: int, ids: Sequence[int], *, every: bool = False) -> Tensor:
        """Append ids to a slot's text; the logits after the last of them, (V), or after each, (T, V)."""

    def begin_together(self, slot: int, texts: Sequence[Sequence[int]]) -> Tensor:
        """Read texts of one length from their start into the slots from this one on; the logits after each, (N, V)."""

    def step(self, ids: Sequence[int], ready: Sequence[bool]) -> Tensor:
        """Append one id to each of the first slots and return their logits, (A, V). Those not ready stay as they are,
        and their logits mean nothing."""


def make_slots(model: nn.Module, count: int) -> Slots:
    """Slots with a cache for a GPT; any other model computes each token from its whole text."""
    return CachedSlots(model, count) if isinstance(model, GPT) else RecomputedSlots(model, count)


@contextmanager
def enough_memory(count: int) -> Iterator[None]:
    """Say what to do where the caches of so many texts do not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the caches of {count} texts do not fit into the GPU's memory", fix="use fewer: --slots 1 or more"
        ) from error


class CachedSlots:
    """The keys and values of a GPT, one tensor (2, count, K, positions, W) per layer, filled in place."""

    def __init__(self, model: GPT, count: int) -> None:
        config = model.config
        self.model, self.count = model, count
        self._lengths = [0] * count
        shape = (2, count, config.kv_heads, config.max_position_embeddings, config.head_width)
        self._rooms = [model.token_embedding.weight.new_empty(shape) for _ in range(config.n_layers)]
        self._clean = 0
        """Positions in use. A mask hides those beyond a text's end, but not a NaN, which unused memory may hold."""
        self._last = model.token_embedding.weight.new_zeros(count, 1, config.d_model)
        """The embedding of each text's newest token, which `smear` adds to the next one's."""

    def clear(self, slot: int) -> None:
        self._lengths[slot] = 0
        self._last[slot] = 0.0

    def move(self, source: int, target: int) -> None:
        length = self._lengths[target] = self._lengths[source]
        self._last[target] = self._last[source]
        for room in self._rooms:
            room[:, target, :, :length] = room[:, source, :, :length]

    def _make_room(self, length: int) -> None:
        end = min(-(-length // _AT_ONCE) * _AT_ONCE, self.model.config.max_position_embeddings)
        for room in self._rooms if end > self._clean else ():
            room[:, :, :, self._clean : end] = 0.0
        self._clean = max(self._clean, end)

    def read(self, slot: int, ids: Sequence[int], *, every: bool = False) -> Tensor:
        hidden = self._read(slot, [ids])[0]
        return self.model.logits(hidden if every else hidden[-1])

    def begin_together(self, slot: int, texts: Sequence[Sequence[int]]) -> Tensor:
        return self.model.logits(self._read(slot, texts)[:, -1])

    def _read(self, slot: int, texts: Sequence[Sequence[int]]) -> Tensor:
        """Append as many ids to each of some slots whose texts have one length: (N, T, D)."""
        self._make_room(self._lengths[slot] + len(texts[0]))
        end = slot + len(texts)
        cache = _SlotCache([room[:, slot:end] for room in self._rooms], self._lengths[slot])
        cache.last = self._last[slot:end]
        hidden = self.model.hidden(torch.tensor(texts, device=self._last.device), cache=cache)
        self._lengths[slot:end] = [cache.length] * len(texts)
        self._last[slot:end] = cache.last
        return hidden

    def step(self, ids: Sequence[int], ready: Sequence[bool]) -> Tensor:
        model, lengths = self.model, self._lengths[: len(ids)]
        device = self._last.device
        input_ids = torch.tensor(ids, device=device)[:, None]  # (A, 1)
        places = torch.tensor(lengths, device=device)  # (A)
        x = model.look_up(input_ids, model.token_embedding.weight)  # (A, 1, D)
        if model.smear is not None:
            before = self._last[: len(ids)]
            newest = torch.where(torch.tensor(ready, device=device)[:, None, None], x, before)
            x = x + model.smear.type_as(x) * before
            before.copy_(newest)
        if model.position_embedding is not None:
            x = x + model.position_embedding(places)[:, None]
        rope = None if model.rope is None else model.rope[:, places, None, None]  # (2, A, 1, 1, W / 2)
        longest = 1 + max(length for length, is_ready in zip(lengths, ready, strict=True) if is_ready)
        self._make_room(1 + max(lengths))
        # Texts of one length need no mask, for which there are faster kernels.
        mask: Tensor | None = None
        if min(lengths) + 1 < longest:
            mask = (torch.arange(longest, device=device) <= places[:, None])[:, None, None]  # (A, 1, 1, L)
        extra_values = model.extra_values(input_ids)
        where = lengths[0] if min(lengths) == max(lengths) else places  # a slice is written faster than an index
        for layer, block in enumerate(model.blocks):
            x = block(x, rope, mask, _NewTokens(self._rooms[layer], where, longest), extra_values.get(layer))
        for slot, is_ready in enumerate(ready):
            self._lengths[slot] += is_ready
        return model.logits(model.final_norm(x)[:, -1])


class _SlotCache(KVCache):
    """The cache of some slots, as the model knows it."""

    def __init__(self, rooms: list[Tensor], length: int) -> None:
        self.layers = [LayerCache(room) for room in rooms]
        for layer in self.layers:
            layer.length = length


class _NewTokens:
    """One layer, in a call with one token of each text, whose keys and values go to places (A) of their own, or to one.

    What a slot that is not ready gets is overwritten when its text goes on.
    """

    def __init__(self, room: Tensor, places: Tensor | int, longest: int) -> None:
        self._room, self._places, self._longest = room, places, longest

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append 2 x (A, K, 1, W); returns all cached keys and values, as views of 2 x (A, K, L, W)."""
        keys, values = self._room[:, : len(k)]
        if isinstance(self._places, int):
            keys[:, :, self._places] = k[:, :, 0]
            values[:, :, self._places] = v[:, :, 0]
        else:
            rows = torch.arange(len(k), device=k.device)
            keys[rows, :, self._places] = k[:, :, 0]
            values[rows, :, self._places] = v[:, :, 0]
        return keys[:, :, : self._longest], values[:, :, : self._longest]


class RecomputedSlots:
    """For models without a cache: the texts themselves."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.count = model, count
        self._texts: list[list[int]] = [[] for _ in range(count)]

    def clear(self, slot: int) -> None:
        self._texts[slot] = []

    def move(self, source: int, target: int) -> None:
        self._texts[target] = [*self._texts[source]]

    def read(self, slot: int, ids: Sequence[int], *, every: bool = False) -> Tensor:
        self._texts[slot] += ids
        device = next(self.model.parameters()).device
        logits: Tensor = self.model(torch.tensor([self._texts[slot]], device=device))[0][0]  # (all tokens, V)
        return logits[-len(ids) :] if every else logits[-1]

    def begin_together(self, slot: int, texts: Sequence[Sequence[int]]) -> Tensor:
        return torch.stack([self.read(slot + number, text) for number, text in enumerate(texts)])

    def step(self, ids: Sequence[int], ready: Sequence[bool]) -> Tensor:
        logits = {slot: self.read(slot, [ids[slot]]) for slot, is_ready in enumerate(ready) if is_ready}
        anything = next(iter(logits.values()))
        return torch.stack([logits.get(slot, anything) for slot in range(len(ids))])
