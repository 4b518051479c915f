"""The body of a request -> what is wanted; errors in the form that OpenAI's clients expect. No HTTP here."""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass
from typing import Any

from drumline.chats import ROLES
from drumline.errors import ConfigError
from drumline.generate import SampleConfig

MOST_CHOICES, MOST_STOPS, MOST_TOP = 128, 16, 20
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
}
"""Parameters that would change the answer if they were supported, and their values that change nothing."""


class ApiError(Exception):
    """An error that the client is told: the HTTP status, a message, and the parameter that is wrong."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a request asks for."""

    prompts: list[str | list[int]]
    """Texts or ids; one, empty, for a chat."""
    messages: list[dict[str, str]]
    """Of a chat."""
    is_chat: bool
    settings: SampleConfig
    """Of the first choice; the others have the seeds that follow."""
    n: int
    max_tokens: int
    stops: tuple[str, ...]
    top: int | None
    """Log probabilities, and how many alternatives."""
    echo: bool
    stream: bool
    includes_usage: bool


def parse(body: bytes, *, is_chat: bool, model: str, most_tokens: int) -> Wanted:
    """What a body of JSON asks for; ApiError if it is not one, or a value is out of range."""
    fields = _Fields(_object(body))
    if (named := fields.text("model")) not in (None, model):
        raise ApiError(
            404, f"the model {named!r} does not exist; this server has {model!r}", param="model", code="model_not_found"
        )
    for name, harmless in _UNSUPPORTED.items():
        if fields.values.get(name) not in harmless:
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
    n = fields.integer("n", 1, 1, MOST_CHOICES)
    if fields.integer("best_of", n, 1, MOST_CHOICES) != n:
        raise ApiError(400, "best_of other than n is not supported", param="best_of", code="unsupported_parameter")
    prompts, messages = _prompts(fields, is_chat=is_chat), _messages(fields) if is_chat else []
    if len(prompts) * n > MOST_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts x n {n} are more than {MOST_CHOICES} choices", param="n")
    stream = fields.boolean("stream")
    options = fields.values.get("stream_options") or {}
    if not isinstance(options, dict) or (options and not stream):
        raise ApiError(400, "stream_options must be an object, and need stream", param="stream_options")
    return Wanted(
        prompts=prompts,
        messages=messages,
        is_chat=is_chat,
        settings=_settings(fields),
        n=n,
        max_tokens=_max_tokens(fields, is_chat=is_chat, most=most_tokens),
        stops=fields.stops(),
        top=_top(fields, is_chat=is_chat),
        echo=fields.boolean("echo") and not is_chat,
        stream=stream,
        includes_usage=bool(options.get("include_usage")),
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body must be a JSON object")
    return values


def _settings(fields: _Fields) -> SampleConfig:
    top_k = fields.integer("top_k", 0, -1, (1 << 31) - 1)
    try:
        return SampleConfig(
            temperature=fields.number("temperature", 1.0, 0.0, 100.0),
            top_p=None if fields.values.get("top_p") is None else fields.number("top_p", 1.0, 0.0, 1.0),
            top_k=top_k if top_k > 0 else None,
            seed=fields.integer("seed", secrets.randbits(63), -(1 << 63), (1 << 63) - 1),
            max_tokens=1,  # the engine counts
        )
    except ConfigError as error:
        raise ApiError(400, error.problem, param=error.problem.split()[0]) from None


def _max_tokens(fields: _Fields, *, is_chat: bool, most: int) -> int:
    name = "max_completion_tokens" if fields.values.get("max_completion_tokens") is not None else "max_tokens"
    return fields.integer(name, most if is_chat else min(16, most), 1 if is_chat else 0, most)


def _top(fields: _Fields, *, is_chat: bool) -> int | None:
    if not is_chat:
        return fields.integer("logprobs", 0, 0, MOST_TOP) if fields.values.get("logprobs") is not None else None
    return fields.integer("top_logprobs", 0, 0, MOST_TOP) if fields.boolean("logprobs") else None


def _prompts(fields: _Fields, *, is_chat: bool) -> list[str | list[int]]:
    """A text, several, ids, or several lists of ids."""
    given = "" if is_chat else fields.values.get("prompt", "")
    prompts = [given] if isinstance(given, str) or _are_ids(given) else given
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or _are_ids(p) for p in prompts):
        raise ApiError(400, "prompt must be a text, a list of texts, or token ids", param="prompt")
    return prompts


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _messages(fields: _Fields) -> list[dict[str, str]]:
    given = fields.values.get("messages")
    if not isinstance(given, list) or not given:
        raise ApiError(400, "messages must be a list of at least one message", param="messages")
    messages = []
    for number, message in enumerate(given):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        role = "system" if role == "developer" else role
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if role not in ROLES or not isinstance(content, str):
            raise ApiError(
                400, f"message {number} needs a role ({', '.join(ROLES)}) and a text as content", param="messages"
            )
        messages.append({"role": str(role), "content": content})
    return messages


class _Fields:
    """The values of an object, by type. null is as good as nothing."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            raise ApiError(400, f"{name} must be a number from {least:g} to {most:g}, not {_shown(value)}", param=name)
        return float(value)

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise ApiError(400, f"{name} must be an integer from {least} to {most}, not {_shown(value)}", param=name)
        return value

    def boolean(self, name: str) -> bool:
        value = self.values.get(name)
        if value not in (None, True, False) or type(value) is int:
            raise ApiError(400, f"{name} must be true or false, not {_shown(value)}", param=name)
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise ApiError(400, f"{name} must be a text, not {_shown(value)}", param=name)
        return value

    def stops(self) -> tuple[str, ...]:
        value = self.values.get("stop")
        stops = [value] if isinstance(value, str) else value or []
        if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
            raise ApiError(400, f"stop must be a text or up to {MOST_STOPS} of them, none empty", param="stop")
        return tuple(stops)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
