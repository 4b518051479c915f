"""Many texts at the same time: requests join and leave a running batch between two tokens.

Each gets the text that `generate` gives it alone: its tokens, its random numbers and what happens at the end of the
context depend on nothing but the request. Logits of a batch can differ from those of one text in their last bits, as
the order of sums does; so a choice between two tokens that are equally likely to six digits may differ too.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from drumline.generate.sample import SampleConfig, choose
from drumline.generate.slots import Slots, enough_memory, make_slots
from drumline.lazy import room
from drumline.model import GPT

PROMPT_TOKENS = 256
"""Tokens of prompts that are read between two tokens of the running texts: long prompts do not stall them."""
Reason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Scored:
    """A token, its log probability after those before it, and the most likely ones; numbers only if asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Reader(Protocol):
    """Gets a request's tokens, in the engine's thread."""

    def prompt_scored(self, tokens: list[Scored]) -> None:
        """The prompt's tokens with their log probabilities, of which the first one has none."""

    def token(self, token: Scored) -> bool:
        """The next token; returns whether the text goes on."""

    def ended(self, reason: Reason, token: Scored | None) -> None:
        """There are no more tokens. stop: by the model or by the reader. length: max_tokens are there.

        token: the one by which the model ended the text, if log probabilities are asked for; no part of the text
        """


@dataclass(eq=False, kw_only=True)
class Request:
    """One text to be generated."""

    prompt: Sequence[int]
    settings: SampleConfig
    reader: Reader
    max_tokens: int
    """As many tokens at most; 0: only read, or score, the prompt."""
    top: int | None = None
    """With each token its log probability, and those of as many of the most likely tokens."""
    scores_prompt: bool = False
    cancelled: bool = False
    """Set by any thread: the text is no longer wanted."""

    window: list[int] = field(default_factory=list, init=False)
    unread: list[int] = field(default_factory=list, init=False)
    """The end of the window that the model has not read yet."""
    in_prompt: bool = field(default=False, init=False)
    """Whether something is to be done with the prompt itself."""
    scores: list[Scored] = field(default_factory=list, init=False)
    made: int = field(default=0, init=False)
    end: Scored | None = field(default=None, init=False)
    """The token that ended the text, if it is to be scored."""
    reason: Reason | None = field(default=None, init=False)
    generator: torch.Generator = field(default_factory=torch.Generator, init=False)


def make_engine(
    model: nn.Module, *, slots: int, context: int, ends: Sequence[int], vocabulary: int | None = None
) -> Engine:
    """An engine for a model where it is: on a GPU, that of a GPT samples there, and runs ahead of its readers.

    slots:      texts at the same time; others wait
    vocabulary: tokens that may be sampled, the first ones; default: all of them
    """
    with enough_memory(slots):
        if isinstance(model, GPT) and model.token_embedding.weight.is_cuda:
            engine: Engine = room("decoding").AheadEngine(
                model, slots=slots, context=context, ends=ends, vocabulary=vocabulary
            )
            return engine
        return Engine(make_slots(model, slots), context=context, ends=ends, vocabulary=vocabulary)


class Engine:
    """Gives each of several requests a slot, and all of them a token at a time.

    slots:   of the model; other texts wait
    context: tokens that the model can read at once
    ends:    ids that end a text; an empty prompt starts from the first of them
    vocabulary: tokens that may be sampled, the first ones; default: all of them
    """

    def __init__(self, slots: Slots, *, context: int, ends: Sequence[int], vocabulary: int | None = None) -> None:
        self.slots, self.context, self.ends, self._vocabulary = slots, context, tuple(ends), vocabulary
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        """The request in each slot in use."""
        self._work = threading.Condition()
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def active(self) -> int:
        return len(self._active)

    def submit(self, request: Request) -> None:
        """Add a request. From any thread."""
        request.window = [*request.prompt][-self.context :] or [self.ends[0] if self.ends else 0]
        request.unread = [*request.window]
        request.in_prompt = request.scores_prompt or request.max_tokens == 0
        request.scores = [Scored(request.window[0])]
        request.generator.manual_seed(request.settings.seed)
        with self._work:
            self._waiting.append(request)
            self._work.notify()

    def close(self) -> None:
        """Let `run` return. From any thread."""
        with self._work:
            self._closed = True
            self._work.notify()

    def run(self) -> None:
        """Work whenever there is some, until `close`."""
        while True:
            with self._work:
                self._work.wait_for(lambda: self._closed or self._waiting or self._active)
                if self._closed:
                    return
            try:
                self.step()
            except Exception:
                logging.getLogger(__name__).exception("a batch of %d texts failed", len(self._active))
                failed, self._active = self._active, []
                for request in failed:
                    request.reader.ended("error", None)

    @torch.inference_mode()
    def step(self) -> None:
        """Let requests join, read some tokens of their prompts, and append a token to each text that is read."""
        self._join()
        budget, slot = PROMPT_TOKENS, 0
        while slot < len(self._active) and budget > 0:
            request, together = self._active[slot], self._together(slot, budget)
            if together > 1:
                budget -= self._read_together(slot, together)
            elif len(request.unread) > 1 or request.in_prompt:
                budget -= self._read(slot, request, budget)
            slot += together
        self._leave()
        ready = [len(request.unread) == 1 and not request.in_prompt for request in self._active]
        if any(ready):
            ids = [request.unread[-1] for request in self._active]
            self._append(self.slots.step(ids, ready)[:, : self._vocabulary], ready)
            self._leave()

    def _join(self) -> None:
        for request in self._active:
            if request.cancelled:
                request.reason = "cancelled"
        self._leave()
        with self._work:
            gone = [request for request in self._waiting if request.cancelled]
            for request in gone:
                self._waiting.remove(request)
        for request in gone:
            request.reader.ended("cancelled", None)
        while self._waiting and len(self._active) < self.slots.count:
            self.slots.clear(len(self._active))
            self._active.append(self._waiting.popleft())

    def _leave(self) -> None:
        """Free the slots of requests that have ended; the last ones move to their places."""
        for slot in reversed(range(len(self._active))):
            request = self._active[slot]
            if request.reason is not None:
                last = self._active.pop()
                if last is not request:
                    self.slots.move(len(self._active), slot)
                    self._active[slot] = last
                request.reader.ended(request.reason, request.end)

    def _together(self, slot: int, budget: int) -> int:
        """How many texts from this one on have not been read at all, and have one length: one pass reads them."""
        length = len(self._active[slot].unread)
        most = budget // length if length > 1 else 1
        for number, each in enumerate(self._active[slot : slot + most]):
            if each.in_prompt or len(each.unread) != length or len(each.window) != length:
                return max(1, number)
        return max(1, min(most, len(self._active) - slot))

    def _read_together(self, slot: int, together: int) -> int:
        """Read the prompts of some texts at once, and append the first token to each; returns what was read."""
        requests = self._active[slot : slot + together]
        logits = self.slots.begin_together(slot, [request.unread for request in requests])[:, : self._vocabulary]
        read = sum(len(request.unread) for request in requests)
        for number, request in enumerate(requests):
            self._go_on(slot + number, request, logits[number])
        return read

    def _read(self, slot: int, request: Request, budget: int) -> int:
        """Read a piece of a prompt and return its length; after the last one, append the first token."""
        piece, request.unread = request.unread[:budget], request.unread[budget:]
        logits = self.slots.read(slot, piece, every=request.scores_prompt and request.in_prompt)
        logits = logits[..., : self._vocabulary]
        if logits.dim() == 2:
            following = request.window[len(request.scores) : len(request.scores) + len(piece)]
            scores = logits.float().log_softmax(dim=-1).cpu()
            request.scores += scored_tokens(scores, following, request.top)
            logits = logits[-1]
        if not request.unread:
            if request.scores_prompt and request.in_prompt:
                request.reader.prompt_scored(request.scores)
            request.in_prompt = False
            if request.max_tokens == 0:
                request.reason = "length"
            else:
                self._go_on(slot, request, logits)
        return len(piece)

    def _append(self, logits: Tensor, ready: Sequence[bool]) -> None:
        """A token to each text that is ready: logits (A, V)."""
        likeliest = logits.argmax(dim=-1).tolist()
        for slot, request in enumerate(self._active):
            if ready[slot]:
                plain = request.settings.temperature == 0.0 and request.top is None
                self._go_on(slot, request, logits[slot], likeliest[slot] if plain else None)

    def _go_on(self, slot: int, request: Request, logits: Tensor, token: int | None = None) -> None:
        """Append a token, by default one that is sampled from logits (V)."""
        if token is None:
            logits = logits.float().cpu()
            token = choose(logits, request.settings, request.generator)
        scored = Scored(token) if request.top is None else _scored(logits.log_softmax(dim=-1), token, request.top)
        self._accept(request, scored)
        request.unread = [token]
        if len(request.window) > self.context:
            request.window = request.window[-max(1, self.context // 2) :]
            request.unread = [*request.window]
            self.slots.clear(slot)

    def _accept(self, request: Request, scored: Scored) -> None:
        """The next token of a text, which may be its end."""
        if scored.token in self.ends:
            request.reason, request.end = "stop", None if request.top is None else scored
            return
        request.made += 1
        if not request.reader.token(scored):
            request.reason = "stop"
        elif request.made == request.max_tokens:
            request.reason = "length"
        request.window.append(scored.token)


def scored_tokens(logprobs: Tensor, tokens: Sequence[int], top: int | None) -> list[Scored]:
    """Tokens with their log probabilities, of logprobs (T, V) on the CPU; as many as there are of both."""
    return [_scored(row, token, top) for row, token in zip(logprobs, tokens, strict=False)]


def _scored(logprobs: Tensor, token: int, top: int | None) -> Scored:
    """A token with its log probability, of logprobs (V) on the CPU."""
    best = logprobs.topk(min(top or 0, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Scored(token, float(logprobs[token]), tuple(pairs))
