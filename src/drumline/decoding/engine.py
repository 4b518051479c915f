"""An engine that launches steps ahead: the host reads tokens while the device makes the next ones.

A token that comes after the end of its text is dropped. Prompts are read whole, several in one pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from drumline.decoding.slots import AheadSlots, Made, Wanted
from drumline.generate import Engine, Request, scored_tokens
from drumline.model import GPT

STEPS_AHEAD = 3
"""Steps that are launched before the tokens of the first of them are read: enough to hide the host's work."""
PROMPT_TOKENS = 8192
"""Tokens of prompts, with their padding, that are read between two steps."""


class AheadEngine(Engine):
    """slots, context, ends: as of an Engine; vocabulary: tokens that may be sampled, the first ones"""

    slots: AheadSlots  # type: ignore[assignment]

    def __init__(
        self,
        model: GPT,
        *,
        slots: int,
        context: int,
        ends: Sequence[int],
        vocabulary: int | None = None,
        fused: bool = True,
    ) -> None:
        made = AheadSlots(model, slots, vocabulary=vocabulary, fused=fused)
        super().__init__(made, context=context, ends=ends, vocabulary=vocabulary)  # type: ignore[arg-type]
        self._running: deque[tuple[Made, list[tuple[int, Request]]]] = deque()
        """What was launched, with the row of each text in it, oldest first."""
        self._ahead: dict[Request, int] = {}
        """Tokens of each active text that were launched and not read."""

    @torch.inference_mode()
    def step(self) -> None:
        """Let requests join, launch a step of all texts, and read the tokens of an earlier one."""
        try:
            self._join()
            self._begin()
            self._leave()
            went_on = self._launch()
            while self._running and (not went_on or len(self._running) > STEPS_AHEAD):
                self._read_oldest()
                went_on = True
            self._leave()
        except Exception:
            self._running.clear()
            raise
        finally:
            self._ahead = {request: self._ahead.get(request, 0) for request in self._active}
            if not self._active:
                self._running.clear()

    def _begin(self) -> None:
        """Read prompts, the first ones that fit into a pass."""
        chosen: list[tuple[int, Request]] = []
        longest = 0
        for slot, request in enumerate(self._active):
            if request.in_prompt:
                self._score_prompt(request)
            if request.unread and request.reason is None:
                longest = max(longest, len(request.unread))
                if chosen and longest * (len(chosen) + 1) > PROMPT_TOKENS:
                    break
                chosen.append((slot, request))
        if not chosen:
            return
        made = self.slots.begin(
            [slot for slot, _ in chosen],
            [request.unread for _, request in chosen],
            [request.settings for _, request in chosen],
            [request.made for _, request in chosen],
            [Wanted(row, request.top) for row, (_, request) in enumerate(chosen) if request.top is not None],
        )
        self._launched(made, [(row, request) for row, (_, request) in enumerate(chosen)])
        for _, request in chosen:
            request.unread = []

    def _score_prompt(self, request: Request) -> None:
        """What is to be done with the prompt itself."""
        if request.scores_prompt:
            logprobs = self.slots.score(request.window).float().log_softmax(dim=-1).cpu()
            request.scores += scored_tokens(logprobs, request.window[1:], request.top)
            request.reader.prompt_scored(request.scores)
        request.in_prompt = False
        if request.max_tokens == 0:
            request.reason = "length"

    def _launch(self) -> bool:
        """A step of all texts that can go on without the host."""
        ready = [self._goes_on(request) for request in self._active]
        if not any(ready):
            return False
        rows = [(row, request) for row, request in enumerate(self._active) if ready[row]]
        wanted = [Wanted(row, request.top) for row, request in rows if request.top is not None]
        self._launched(self.slots.launch(ready, wanted), rows)
        return True

    def _goes_on(self, request: Request) -> bool:
        """Not if it has all its tokens, or is at the end of the context, where the host must read the last of them."""
        ahead = self._ahead.get(request, 0)
        fits = len(request.window) + ahead <= self.context and request.made + ahead < request.max_tokens
        return fits and not request.unread and request.reason is None

    def _launched(self, made: Made, rows: list[tuple[int, Request]]) -> None:
        self._running.append((made, rows))
        for _, request in rows:
            self._ahead[request] = self._ahead.get(request, 0) + 1

    def _read_oldest(self) -> None:
        """Give the tokens of the oldest step to their readers."""
        made, rows = self._running.popleft()
        tokens = made.take()
        for row, request in rows:
            if request.reason is None:
                self._ahead[request] -= 1
                self._accept(request, tokens[row])
                if len(request.window) > self.context:
                    request.window = request.unread = request.window[-max(1, self.context // 2) :]
