"""Messages -> the prompt of a model that talks, and what it should answer.

A template beside the tokenizer (chat_template.jinja, or chat_template in tokenizer_config.json, as Hugging Face models
have them) decides what it looks like; else it is plain text, which any model can continue. Prompts and answers are
encoded apart, in training and in a conversation: no token spans the boundary between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers

from drumline.data import Tokenizer
from drumline.errors import DataError
from drumline.files import RunFolder

Message = Mapping[str, str]
"""role (system, user or assistant) and content."""
Piece = tuple[str, bool]
"""A part of a conversation's text, and whether it is an answer: what the assistant should write, with its end."""
STYLE = "chat.json"
"""Of a folder of tokens or a run: how its conversations are written."""
PASSED, COUNTS, ENDS = 0, 1, 2
"""What a token is as a target: not counted; counted; or in its place, the end-of-text token counts: an answer ends
before it, and the conversation goes on."""
_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
ROLES = tuple(_NAMES)
_PLAIN = (
    "{% for message in messages %}{% set content = message['content'] | trim"
    + "".join(f" | replace('\\n{name}:', '\\n {name}:')" for name in _NAMES.values())
    + " %}{{ message['role'] | capitalize }}: {{ content }}"
    "{% if message['role'] != 'assistant' or not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""In jinja, what `_plain` writes."""
_FORGED = re.compile(rf"\n(?=({'|'.join(_NAMES.values())}):)")


@dataclass(frozen=True)
class ChatStyle:
    """How conversations are written."""

    template: str = ""
    """In jinja; empty: as plain text."""
    bos_token: str = ""
    eos_token: str = ""

    @classmethod
    def found(cls, folder: Path | None) -> ChatStyle:
        """That of a folder with a tokenizer: what its tokens were made with, or the template of a model."""
        if folder is None or not folder.is_dir():
            return cls()
        if (folder / STYLE).exists():
            return cls._read(folder / STYLE)
        for place in (folder, RunFolder(folder).pretrained):  # files of the model that a run began from
            settings, source = _template_in(place)
            if source:
                return cls(source, _text_of(settings.get("bos_token")), _text_of(settings.get("eos_token")))
        return cls()

    @classmethod
    def _read(cls, path: Path) -> ChatStyle:
        try:
            return cls(**{name: str(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is damaged: {error}", fix="copy it again, from the folder of the tokens") from None

    @property
    def jinja(self) -> str:
        """The template, for other programs."""
        return self.template or _PLAIN

    def text(self) -> str:
        """The content of chat.json."""
        return json.dumps(asdict(self), indent=2) + "\n"


class ChatFormat:
    """Messages -> pieces of text. specials: the tokens that no message may contain, if there is a template"""

    def __init__(self, style: ChatStyle, specials: Sequence[str] = (), *, origin: str = "") -> None:
        self.style, self._specials = style, specials
        self._template = _compiled(style.template, origin) if style.template else None

    def prompt(self, messages: Sequence[Message]) -> list[str]:
        """A conversation up to where the answer begins; DataError if it cannot be written."""
        if self._template is None:
            pieces, rest = _plain(messages)
            return [*(text for text, _ in pieces), f"{rest}Assistant:"]
        self._check(messages)
        so_far: list[list[Piece]] = []
        with suppress(DataError):  # a template that cannot be trained with may still be talked with
            so_far = self._rendered(messages)
        whole = self._render(messages, asks=True)
        before = [text for text, _ in so_far[-1]] if so_far else []
        done = "".join(before)
        return [*before, whole[len(done) :]] if whole.startswith(done) else [whole]

    def conversations(self, messages: Sequence[Message]) -> list[list[Piece]]:
        """What to train on: prompts and answers in turn, up to the last answer; DataError if it cannot be written.

        More than one if the template writes earlier turns in another way than when they were answered: each answer is
        then trained on after the prompt that it would be given after.
        """
        if self._template is None:
            return [_plain(messages)[0]]
        self._check(messages)
        return self._rendered(messages)

    def _rendered(self, messages: Sequence[Message]) -> list[list[Piece]]:
        conversations: list[list[Piece]] = []
        done = ""
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:place], asks=True)
            answered = self._render(messages[: place + 1], asks=False)
            if not answered.startswith(prompt):
                raise DataError(
                    "the chat template does not write an answer after its own prompt for one",
                    fix="use a template whose add_generation_prompt writes what an answer begins with",
                )
            if not conversations or not prompt.startswith(done):
                conversations.append([])
                done = ""
            answer = self._answer(answered[len(prompt) :], message["content"].strip())
            conversations[-1] += [(prompt[len(done) :], False), (answer, True)]
            done = prompt + answer
        return conversations

    def _answer(self, text: str, content: str) -> str:
        """What the template writes for an answer, up to the special token that ends it, or to its content's end."""
        end = text.find(content) + len(content) if content in text else 0
        ends = [(text.index(special, end), special) for special in self._specials if special in text[end:]]
        if ends:
            place, special = min(ends)
            return text[: place + len(special)]
        return text[:end] if end else text

    def _check(self, messages: Sequence[Message]) -> None:
        for message in messages:
            for special in self._specials:
                if special in message["content"]:
                    # As a token, it would end the message and begin another, in anybody's name.
                    raise DataError(f"a message contains the special token {special}", fix="write it in another way")

    def _render(self, messages: Sequence[Message], *, asks: bool) -> str:
        assert self._template is not None
        names = {"bos_token": self.style.bos_token, "eos_token": self.style.eos_token}
        try:
            text: str = self._template.render(messages=[*messages], add_generation_prompt=asks, **names)
        except Exception as error:  # a template can raise anything, also to refuse the order of the messages
            raise DataError(f"the chat template refuses the messages: {error}", fix="change their order") from error
        return text


def _plain(messages: Sequence[Message]) -> tuple[list[Piece], str]:
    """A conversation as plain text, in pieces that end with an answer, and what comes after it.

    Only we begin a line with the name of a role: such a line in a message is indented by a space.
    """
    pieces: list[Piece] = []
    text = ""
    for message in messages:
        content = _FORGED.sub("\n ", message["content"].strip())
        if message["role"] == "assistant":
            pieces += [(f"{text}Assistant:", False), (f" {content}", True)]
            text = "\n"
        else:
            text += f"{_NAMES[message['role']]}: {content}\n"
    return pieces, text


@dataclass(frozen=True)
class Encoded:
    """A conversation's tokens without the end-of-text token that comes after it, and all of them as targets."""

    ids: list[int]
    targets: list[int]
    """PASSED, COUNTS or ENDS of each, and of the end-of-text token."""


class ChatTemplate:
    """Messages -> ids.

    folder: where the template may be, if the tokenizer is from a folder
    style:  how conversations are written, if that is known
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path | None = None, *, style: ChatStyle | None = None) -> None:
        self._tokenizer = tokenizer
        self.ends: tuple[int, ...] = (tokenizer.end_of_text,)
        """Ids that end an answer."""
        self.stops: tuple[str, ...] = ()
        """Strings that end it."""
        style = ChatStyle.found(folder) if style is None else style
        self._inner: tokenizers.Tokenizer | None = None
        self._specials: set[int] = set()
        if not style.template:
            self.format = ChatFormat(style)
            self.stops = tuple(f"\n{name}:" for name in _NAMES.values())
            return
        self._inner = tokenizers.Tokenizer.from_str(tokenizer.serialized.decode())
        added = {
            number: token.content for number, token in self._inner.get_added_tokens_decoder().items() if token.special
        }
        self._specials = set(added)
        self.format = ChatFormat(style, list(added.values()), origin=f" in {folder}" if folder else "")
        self.ends = tuple(dict.fromkeys((*self.ends, *self._other_ends(style))))

    def _other_ends(self, style: ChatStyle) -> list[int]:
        """The token that the template calls the end, and the one that it writes after an answer."""
        assert self._inner is not None
        eos: int | None = self._inner.token_to_id(style.eos_token)
        ends = [] if eos is None else [eos]
        with suppress(DataError):  # it refuses this conversation
            ((*_, (answer, _)),) = self.format.conversations(
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            )
            ends += [token for token in self._encode([answer])[0][-1:] if token in self._specials]
        return ends

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._inner is None:
            return self._tokenizer.encode_batch(texts)
        return [encoding.ids for encoding in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the answer begins. DataError if that cannot be written."""
        return [token for part in self._encode(self.format.prompt(messages)) for token in part]

    def encode_to_train(self, pieces: Sequence[Piece]) -> Encoded:
        """A conversation of `ChatFormat.conversations`. An answer ends with a special token, or with end-of-text."""
        ids: list[int] = []
        targets: list[int] = []
        is_open = False
        for (_, is_answer), part in zip(pieces, self._encode([text for text, _ in pieces]), strict=True):
            targets += [COUNTS if is_answer else PASSED] * len(part)
            if is_open and part:
                targets[len(ids)] = ENDS
            ids += part
            is_open = (is_answer and part[-1] not in self._specials) or (is_open and not part)
        if ids[-1:] == [self._tokenizer.end_of_text]:  # which comes after every conversation
            del ids[-1], targets[-1]
            is_open = True
        return Encoded(ids, [*targets, COUNTS if is_open else PASSED])

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


def _template_in(folder: Path) -> tuple[dict[str, Any], str]:
    """tokenizer_config.json and the source of the template; empty where there is none."""
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        read = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        settings = read if isinstance(read, dict) else {}
    with suppress(OSError, ValueError):
        return settings, (folder / "chat_template.jinja").read_text(encoding="utf-8")
    named = settings.get("chat_template")
    return settings, named if isinstance(named, str) else ""


def _compiled(source: str, origin: str) -> Any:
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
        raise DataError(f"the chat template{origin} is not valid: {error}", fix="repair or remove it") from error


def _text_of(token: Any) -> str:
    """A special token in tokenizer_config.json: its text, or an object with it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
