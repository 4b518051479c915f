"""A request in work: its choices in the engine, and their pieces on the way to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from drumline.chats import ChatTemplate
from drumline.errors import ConfigError, DataError
from drumline.generate import Engine, Request, WritingRun
from drumline.model import GPT
from drumline.serve.choices import Choice, Piece
from drumline.serve.requests import ApiError, Wanted


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may ask for."""

    max_tokens: int
    """Tokens of one choice."""
    max_waiting: int
    """Choices that wait for a slot, over all requests."""
    max_body_bytes: int
    timeout_s: float
    """Until an answer is complete."""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("max_waiting", 0), ("max_body_bytes", 1), ("timeout_s", 1)):
            if not least <= (value := getattr(self, name)) < float("inf"):
                raise ConfigError(f"{name} {value} lets no request through", fix=f"use --{name} {least} or more")


class Service:
    """A model that answers."""

    def __init__(self, run: WritingRun, engine: Engine, template: ChatTemplate, *, name: str, limits: Limits) -> None:
        self.run, self.engine, self.template, self.name, self.limits = run, engine, template, name, limits
        self.draining = False
        model = run.model
        self._vocab_size = model.config.vocab_size if isinstance(model, GPT) else run.tokenizer.vocab_size

    def encode(self, wanted: Wanted) -> list[list[int]]:
        """The ids of each prompt; ApiError for what the model cannot read."""
        texts = [message["content"] for message in wanted.messages] + [p for p in wanted.prompts if isinstance(p, str)]
        try:
            "".join(texts).encode()  # JSON can have halves of characters
            if wanted.is_chat:
                prompts = [self.template.fitting(wanted.messages, context=self.run.context)]
            else:
                prompts = [self.run.tokenizer.encode(p) if isinstance(p, str) else p for p in wanted.prompts]
        except (DataError, UnicodeEncodeError) as error:
            problem = error.problem if isinstance(error, DataError) else "the text is not valid Unicode"
            raise ApiError(400, problem, param="messages" if wanted.is_chat else "prompt") from None
        for prompt in prompts:
            if len(prompt) > self.run.context:
                raise ApiError(
                    400,
                    f"a prompt of {len(prompt)} tokens exceeds the model's context of {self.run.context}",
                    param="messages" if wanted.is_chat else "prompt",
                    code="context_length_exceeded",
                )
            if strangers := [token for token in prompt if not 0 <= token < self._vocab_size]:
                raise ApiError(400, f"token {strangers[0]} is not in 0 to {self._vocab_size - 1}", param="prompt")
        return prompts


class Job:
    """The choices of one request. Pieces come from the engine's thread."""

    def __init__(self, service: Service, wanted: Wanted, prompts: list[list[int]]) -> None:
        engine, limits = service.engine, service.limits
        self.choices = len(prompts) * wanted.n
        if service.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if engine.waiting + self.choices > limits.max_waiting + engine.slots.count - engine.active:
            raise ApiError(429, f"{engine.waiting} texts are waiting already; try again later", code="queue_full")
        self._loop, self._pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()
        self._deadline = self._loop.time() + limits.timeout_s
        self._timeout_s = limits.timeout_s
        self._requests = [
            self._request(service, wanted, prompt, prompt_number * wanted.n + number, number)
            for prompt_number, prompt in enumerate(prompts)
            for number in range(wanted.n)
        ]
        for request in self._requests:
            engine.submit(request)

    def _request(self, service: Service, wanted: Wanted, prompt: list[int], index: int, number: int) -> Request:
        stops = (*wanted.stops, *(service.template.stops if wanted.is_chat else ()))
        seed = (wanted.settings.seed + number) % (1 << 63) if number else wanted.settings.seed
        echoed = prompt if wanted.echo else None
        choice = Choice(
            index,
            service.run.tokenizer,
            self._post,
            stops=stops,
            stream=wanted.stream,
            echoed=echoed,
            scores_end=not wanted.is_chat,  # as clients of completions expect: max_tokens 1 has one token in any case
        )
        return Request(
            prompt=prompt,
            settings=replace(wanted.settings, seed=seed),
            reader=choice,
            max_tokens=wanted.max_tokens,
            top=wanted.top,
            scores_prompt=wanted.echo and wanted.top is not None and bool(prompt),
        )

    def _post(self, piece: Piece) -> None:
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces, until each choice has ended. ApiError if that takes too long, or the engine fails."""
        left = self.choices
        while left:
            try:
                piece = await asyncio.wait_for(self._pieces.get(), self._deadline - self._loop.time())
            except TimeoutError:
                raise ApiError(503, f"not done within {self._timeout_s:g} s", code="timeout") from None
            if piece.reason == "error":
                raise ApiError(503, "the model failed; the server's log says why", code="engine_error")
            left -= piece.reason is not None
            yield piece

    def cancel(self) -> None:
        """Free the slots, if the choices still have some."""
        for request in self._requests:
            request.cancelled = True
