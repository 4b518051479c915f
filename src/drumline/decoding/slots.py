"""Texts of a GPT that grow on the device: prompts in, tokens out; the host launches the next without waiting for one.

Shapes: N slots, R texts that begin, T tokens of the longest prompt, B texts in a step, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.decoding.graphs import Replayed, rounded
from drumline.decoding.sampling import Kind
from drumline.decoding.state import PromptLayer, State
from drumline.decoding.step import PlainStep, Step, choose
from drumline.generate import SampleConfig, Scored
from drumline.model import GPT, KVCache

_OLDEST = (8, 0)
"""Compute capability of GPUs that have the memory for the tiles of the kernels."""


@dataclass(frozen=True)
class Wanted:
    """Log probabilities that are asked for: of the text in this row, with those of the `top` likeliest tokens."""

    row: int
    top: int


class Made:
    """Tokens that the device is making: (B), and what was asked for beside them."""

    def __init__(self, tokens: Tensor, logits: Tensor, wanted: Sequence[Wanted]) -> None:
        """tokens and logits may be overwritten once this returns, by what is launched after it."""
        self._tokens = _to_host(tokens)
        self._scores = {each.row: self._scored(tokens[each.row], logits[each.row], each.top) for each in wanted}
        self._done: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def _scored(self, token: Tensor, logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
        logprobs = logits.float().log_softmax(dim=-1)
        best = logprobs.topk(min(top, len(logprobs)))
        own = logprobs.gather(0, token[None])  # logprobs[token] would wait for the token
        numbers = torch.cat((own, best.values))
        return _to_host(numbers), _to_host(best.indices)

    def take(self) -> list[Scored]:
        """Wait for them."""
        if self._done is not None:
            self._done.synchronize()
        made = [Scored(token) for token in self._tokens.tolist()]
        for row, (numbers, ids) in self._scores.items():
            own, *others = numbers.tolist()
            made[row] = Scored(made[row].token, own, tuple(zip(ids.tolist(), others, strict=True)))
        return made


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class AheadSlots:
    """Slots 0 to count - 1; those in use are always the first ones.

    vocabulary: tokens that may be sampled, the first ones; default: all of them
    fused: use the kernels, where they apply
    """

    def __init__(self, model: GPT, count: int, *, vocabulary: int | None = None, fused: bool = True) -> None:
        self.model, self.count = model, count
        self.vocabulary = min(vocabulary or model.config.vocab_size, model.config.vocab_size)
        self._state = State(model, count)
        self._on_gpu = self._state.device.type == "cuda"
        self._step = self._make_step(fused=fused)
        self._lengths = [0] * count
        """Tokens in the cache once all that was launched is done."""
        self._kinds: list[Kind] = ["greedy"] * count
        self._ready: list[bool] = [False] * count
        """As it is on the device."""

    def _make_step(self, *, fused: bool) -> Step:
        step: Step = PlainStep(self.model, self._state, vocabulary=self.vocabulary)
        if fused and self._on_gpu and importlib.util.find_spec("triton") is not None:
            from drumline.decoding.fused import FusedStep, fits

            if fits(self.model) and torch.cuda.get_device_capability(self._state.device) >= _OLDEST:
                step = FusedStep(self.model, self._state, vocabulary=self.vocabulary)
        return Replayed(step, self._state) if self._on_gpu else step

    def clear(self, slot: int) -> None:
        """Begin a new text: `begin` sets all that a slot has."""

    def move(self, source: int, target: int) -> None:
        """Let `target` hold what `source` holds."""
        self._lengths[target], self._kinds[target] = self._lengths[source], self._kinds[source]
        self._state.move(source, target, self._lengths[source])

    def begin(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleConfig],
        draws: list[int],
        wanted: Sequence[Wanted] = (),
    ) -> Made:
        """Read whole prompts into slots and sample a token after each. draws: tokens sampled before, of each text"""
        state = self._state
        where = state.begin(slots, prompts, settings, draws)  # (R)
        longest = max(len(prompt) for prompt in prompts)
        padded = state.sent([[*prompt] + [0] * (longest - len(prompt)) for prompt in prompts], torch.int64)  # (R, T)
        cache = _NewTexts(state.cache, where)
        hidden = self.model.hidden(padded, cache=cache)  # (R, T, D)
        last = hidden[torch.arange(len(slots), device=state.device), state.lengths[where] - 1]
        logits = self.model.logits(last)[:, : self.vocabulary]
        for slot, prompt, each in zip(slots, prompts, settings, strict=True):
            self._lengths[slot], self._kinds[slot] = len(prompt), kind_of(each)
        state.ids[where] = choose(logits, _hardest([self._kinds[slot] for slot in slots]), state, where)
        state.draws[where] += 1
        return Made(state.ids[where], logits, wanted)

    def score(self, ids: Sequence[int]) -> Tensor:
        """Logits after each of some tokens, (T, V), without any slot."""
        return self.model.logits(self.model.hidden(self._state.sent([[*ids]], torch.int64))[0])[:, : self.vocabulary]

    def launch(self, ready: Sequence[bool], wanted: Sequence[Wanted] = ()) -> Made:
        """Append a token to each of the first slots that are ready; the tokens of others mean nothing."""
        active = [slot for slot, is_ready in enumerate(ready) if is_ready]
        flags = [*ready] + [False] * (self.count - len(ready))
        if flags != self._ready:
            self._ready = flags
            self._state.ready.copy_(self._state.sent(flags, torch.bool))
        longest = 1 + max(self._lengths[slot] for slot in active)
        texts, positions = rounded(len(ready), longest, slots=self.count, most=self._state.positions)
        logits = self._step(texts, positions, _hardest([self._kinds[slot] for slot in active]))
        for slot in active:
            self._lengths[slot] += 1
        return Made(self._state.ids[: len(ready)], logits, wanted)


class _NewTexts(KVCache):
    """The cache of several new texts, as the model knows it."""

    def __init__(self, cache: Tensor, slots: Tensor) -> None:
        self.layers = [PromptLayer(room, slots) for room in cache]
        self.last = None


def kind_of(settings: SampleConfig) -> Kind:
    """What a text with these settings needs of a step."""
    if settings.temperature == 0.0 or settings.top_k == 1:
        return "greedy"
    return "free" if settings.top_k is None and settings.top_p in (None, 1.0) else "limited"


def _hardest(kinds: Sequence[Kind]) -> Kind:
    """What does for all of them: texts that need less get what they get alone."""
    return "limited" if "limited" in kinds else "free" if "free" in kinds else "greedy"
