"""Messages -> the prompt of a model that talks.

A template beside the tokenizer (chat_template.jinja, or chat_template in tokenizer_config.json, as Hugging Face models
have them) decides what it looks like; else it is plain text, which any model can continue.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tokenizers

from drumline.data import TOKENIZER, Tokenizer
from drumline.errors import DataError

Message = Mapping[str, str]
"""role (system, user or assistant) and content."""
_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
ROLES = tuple(_NAMES)


class ChatTemplate:
    """folder: where the template may be, if the tokenizer is from a folder."""

    def __init__(self, tokenizer: Tokenizer, folder: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self.ends: tuple[int, ...] = (tokenizer.end_of_text,)
        """Ids that end an answer."""
        self.stops: tuple[str, ...] = ()
        """Strings that end it."""
        settings, source = _found(folder) if folder is not None else ({}, "")
        if not source or folder is None:
            self._template: Any = None
            self.stops = tuple(f"\n{name}:" for name in _NAMES.values())
            return
        self._template = _compiled(source, folder)
        self._names = {name: _text_of(settings.get(name)) for name in ("bos_token", "eos_token")}
        self._inner = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        self._inner.no_truncation()
        self._specials = [token.content for token in self._inner.get_added_tokens_decoder().values() if token.special]
        end = self._inner.token_to_id(self._names["eos_token"])
        self.ends = self.ends if end is None or end in self.ends else (*self.ends, end)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the answer begins. DataError if that cannot be written."""
        if self._template is None:
            lines = [f"{_NAMES[message['role']]}: {message['content']}\n" for message in messages]
            return self._tokenizer.encode("".join(lines) + "Assistant:")
        for message in messages:
            for special in self._specials:
                if special in message["content"]:
                    # As a token, it would end the message and begin another, in anybody's name.
                    raise DataError(f"a message contains the special token {special}", fix="write it in another way")
        try:
            text = self._template.render(messages=[*messages], add_generation_prompt=True, **self._names)
        except Exception as error:  # a template can raise anything, also to refuse the order of the messages
            raise DataError(f"the chat template refuses the messages: {error}", fix="change their order") from error
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def fitting(self, messages: Sequence[Message], *, context: int) -> list[int]:
        """As `encode`, without the oldest turns if all of them would leave less than a quarter of the context."""
        messages, ids = [*messages], self.encode(messages)
        while len(ids) > context - context // 4:
            turns = [place for place, message in enumerate(messages) if message["role"] != "system"]
            if len(turns) < 2:
                break
            # An answer goes with its question: a conversation begins with the user.
            del messages[turns[0] : turns[2] if len(turns) > 2 else turns[1]]
            ids = self.encode(messages)
        return ids


def _found(folder: Path) -> tuple[dict[str, Any], str]:
    """tokenizer_config.json and the source of the template; empty where there is none."""
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        read = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings = read if isinstance(read, dict) else {}
    with suppress(OSError, ValueError):
        return settings, (folder / "chat_template.jinja").read_text(encoding="utf-8")
    named = settings.get("chat_template")
    return settings, named if isinstance(named, str) else ""


def _compiled(source: str, folder: Path) -> Any:
    """A template in a sandbox: it may come from a stranger."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise DataError(f"the chat template in {folder} is not valid: {error}", fix="repair or remove it") from error


def _text_of(token: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object with it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
