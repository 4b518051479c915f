"""Pieces of text -> the JSON of OpenAI's API, whole or as a stream of events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from drumline.data import Tokenizer
from drumline.generate import Reason
from drumline.serve.choices import Piece, Placed
from drumline.serve.requests import Wanted

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Answer:
    """The form of one answer."""

    def __init__(self, wanted: Wanted, tokenizer: Tokenizer, *, model: str, prompt_tokens: int) -> None:
        self._wanted, self._tokenizer, self._prompt_tokens = wanted, tokenizer, prompt_tokens
        self._made = 0
        self._named: set[int] = set()
        """Choices whose first chunk, which names the role, was made."""
        self._head = {
            "id": ("chatcmpl-" if wanted.is_chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer of all pieces."""
        choices = []
        for index in sorted({piece.index for piece in pieces}):
            own = [piece for piece in pieces if piece.index == index]
            text, tokens = "".join(piece.text for piece in own), [token for piece in own for token in piece.tokens]
            self._made += own[-1].made
            content = {"message": {"role": "assistant", "content": text}} if self._wanted.is_chat else {"text": text}
            choices.append(self._choice(index, content, tokens, own[-1].reason))
        kind = "chat.completion" if self._wanted.is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of a piece."""
        self._made += piece.made if piece.reason else 0
        if not self._wanted.is_chat:
            return [self._chunk(piece, {"text": piece.text}, piece.reason)]
        role = {} if piece.index in self._named else {"role": "assistant"}
        self._named.add(piece.index)
        chunks = []
        if piece.text or piece.tokens or role:
            chunks.append(self._chunk(piece, {"delta": {**role, "content": piece.text}}, None))
        if piece.reason:
            end = Piece(piece.index, "", [], piece.reason)
            chunks.append(self._chunk(end, {"delta": {}}, piece.reason))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": self._usage()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._wanted.is_chat else "text_completion"

    def _chunk(self, piece: Piece, content: dict[str, Any], reason: Reason | None) -> dict[str, Any]:
        choice = self._choice(piece.index, content, piece.tokens, reason)
        return {**self._head, "object": self._chunk_kind, "choices": [choice]}

    def _choice(
        self, index: int, content: dict[str, Any], tokens: list[Placed], reason: Reason | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._wanted.top is not None and (tokens or not self._wanted.stream):
            logprobs = self._of_chat(tokens) if self._wanted.is_chat else self._of_completion(tokens)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _of_completion(self, tokens: list[Placed]) -> dict[str, Any]:
        tops = [{self._name(token): logprob for token, logprob in each.scored.top} for each in tokens]
        return {
            "tokens": [self._name(each.scored.token) for each in tokens],
            "token_logprobs": [each.scored.logprob for each in tokens],
            "top_logprobs": [
                top if each.scored.logprob is not None else None for top, each in zip(tops, tokens, strict=True)
            ],
            "text_offset": [each.offset for each in tokens],
        }

    def _of_chat(self, tokens: list[Placed]) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._tokenizer.decode([token])
            as_bytes = None if _INCOMPLETE in text else list(text.encode())
            return {"token": self._name(token), "logprob": logprob, "bytes": as_bytes}

        return {
            "content": [
                {
                    **entry(each.scored.token, each.scored.logprob),
                    "top_logprobs": [entry(token, logprob) for token, logprob in each.scored.top],
                }
                for each in tokens
            ]
        }

    def _name(self, token: int) -> str:
        """A token's text, or its id if it is only a part of a character: names are keys."""
        text = self._tokenizer.decode([token])
        return f"token_id:{token}" if _INCOMPLETE in text else text

    def _usage(self) -> dict[str, int]:
        made, read = self._made, self._prompt_tokens
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
