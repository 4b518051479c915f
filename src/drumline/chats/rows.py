"""Rows with messages -> conversations, checked, and divided into training and validation data.

A document's text is here a conversation in pieces, as JSON: see `drumline.chats.templates.Piece`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from drumline.chats.templates import ROLES, ChatFormat, ChatStyle, Message, Piece
from drumline.data import Corpus, Document, Labelled, Reading, Skipped, documents
from drumline.errors import DataError

_ROW = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class ChatCorpus(Corpus):
    """Conversations of a source. A conversation is never divided."""

    format: ChatFormat = field(default_factory=lambda: ChatFormat(ChatStyle()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if "builtin" in (self.source, self.valid_source):
            raise DataError(
                "builtin is plain text, not conversations",
                fix=f"use --train_data_path with rows of {_ROW}, or drop --format chat",
            )

    def key(self) -> list[str | float]:
        return [*super().key(), "chat", self.format.style.text()]

    def reading(self, on_bytes: Callable[[int], None], skipped: Skipped | None = None) -> Reading:
        name = "messages" if self.field == "text" else self.field
        skipped = skipped or Skipped()
        return Reading(field=name, on_error=self.on_error, skipped=skipped, on_bytes=on_bytes, format="chat")

    def survey(
        self, reading: Reading, *, sample_bytes: int, on_text: Callable[[int], None]
    ) -> tuple[list[str], int | None]:
        sample: list[str] = []
        sampled = total = number = 0
        needs_cut = self.holds_out_documents
        for number, document in enumerate(self._read(self.source, reading), start=1):
            total += len(document.text)
            on_text(len(document.text))
            if self.is_held_out(number - 1, document):
                needs_cut = False
            elif sampled < sample_bytes:
                sample.append("".join(text for pieces in read_pieces(document.text) for text, _ in pieces))
                sampled += len(document.text)
            if not needs_cut and sampled >= sample_bytes:
                break
        if needs_cut and number == 1:
            raise DataError(
                f"{self.source} has one conversation: it cannot be trained on and held out for validation",
                fix="use more, or --valid_fraction 0",
            )
        return sample, total - max(1, round(total * self.valid_fraction)) if needs_cut else None

    def labelled(self, reading: Reading, *, cut_bytes: int | None) -> Iterator[Labelled]:
        """cut_bytes: from `survey`; the first conversation is trained on, and the last is held out."""
        total = 0
        for index, document in enumerate(self._read(self.source, reading)):
            total += len(document.text)
            held_out = self.is_held_out(index, document) if cut_bytes is None else index > 0 and total > cut_bytes
            yield ("valid" if held_out else "train"), document
        if self.valid_split:
            source, split = self.valid_split
            for document in self._read(source, reading, split=split):
                yield "valid", document

    def _read(self, source: str, reading: Reading, *, split: str = "train") -> Iterator[Document]:
        empty = True
        for document in documents(source, reading, split=split):
            try:
                conversations = self.format.conversations(_messages(document.text, reading.field))
            except DataError as error:
                reading.bad(
                    f"{document.name}: {error.problem}", fix=f"{error.fix}, or skip such rows with --on_error skip"
                )
                continue
            empty = False
            yield Document(document.name, json.dumps(conversations))
        if empty:
            skipped = reading.skipped
            raise DataError(
                f"{source} has no conversations; {skipped.count} skipped, first: {skipped.first[0]}",
                fix=f"write rows of {_ROW}",
            )


def read_pieces(text: str) -> list[list[Piece]]:
    """The pieces of each conversation in a document of ours."""
    return [[(text, is_answer) for text, is_answer in pieces] for pieces in json.loads(text)]


def _messages(text: str, name: str) -> list[Message]:
    """The messages in a row's field, which is JSON; DataError if they are not a conversation with answers."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError("this is plain text, not rows with messages", fix=f"write .jsonl with rows of {_ROW}") from None
    if not isinstance(value, list):
        raise DataError(f"field {name!r} is {_kind(value)}, not a list of messages", fix=f"write rows of {_ROW}")
    if not value:
        raise DataError(f"field {name!r} has no messages", fix="remove the row")
    messages = [_message(item, number) for number, item in enumerate(value, start=1)]
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"the last message is from the {messages[-1]['role']}, not from the assistant",
            fix="add the answer, or remove the message",
        )
    return messages


def _message(item: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
        raise DataError(f"{where} has no role and content", fix=f"write rows of {_ROW}")
    role, content = item["role"], item["content"]
    if role not in ROLES:
        raise DataError(f"{where} has the role {str(role)[:40]!r}", fix=f"use one of {', '.join(ROLES)}")
    if role == "system" and number > 1:
        raise DataError(f"{where} is from the system, which only comes first", fix="move or remove it")
    if not isinstance(content, str):
        raise DataError(f"the content of {where} is {_kind(content)}, not a string", fix="write it as text")
    if not content.strip():
        raise DataError(f"the content of {where} is empty", fix="remove the message or the row")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(content[error.start]):04X}"
        raise DataError(f"{where} has half of a surrogate pair ({half}), not text", fix="repair it") from None
    return {"role": role, "content": content}


def _kind(value: object) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
