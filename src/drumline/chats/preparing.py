"""Conversations -> a folder of tokens that also has what each token is as a target."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from drumline.chats.rows import ChatCorpus, read_pieces
from drumline.chats.templates import STYLE, ChatStyle, ChatTemplate, Encoded
from drumline.data import Corpus, Recipe, TokenFile, Tokenizer, TokenWriter, targets_file
from drumline.files import RunFolder, flush


def chat_recipe(recipe: Recipe, tokenizer: str | Path | None) -> Recipe:
    """The recipe for conversations; tokenizer: its file, which may have a template beside it"""
    style = ChatStyle.found(Path(tokenizer).parent) if tokenizer else ChatStyle()
    form = ChatTemplate(recipe.tokenizer, style=style).format if recipe.tokenizer else None
    more: dict[str, Any] = {} if form is None else {"format": form}
    corpus = ChatCorpus(**{each.name: getattr(recipe.corpus, each.name) for each in fields(Corpus)}, **more)
    return ChatRecipe(corpus, recipe.tokenizer, recipe.vocab_size, fast=False, style=style)


@dataclass(frozen=True)
class ChatRecipe(Recipe):
    """How conversations become tokens."""

    style: ChatStyle = field(default_factory=ChatStyle)

    def writer(self, folder: Path, split: str, tokenizer: Tokenizer) -> TokenWriter:
        return _ChatWriter(folder, split, tokenizer, self.style)

    def encoder(self, tokenizer: Tokenizer) -> Callable[[Sequence[str]], Sequence[Any]]:
        template = ChatTemplate(tokenizer, style=self.style)
        return lambda texts: [[template.encode_to_train(pieces) for pieces in read_pieces(text)] for text in texts]


class _ChatWriter(TokenWriter):
    """Appends conversations to one split of a folder."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, style: ChatStyle) -> None:
        super().__init__(folder, split, vocab_size=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text)
        for name in (targets_file(split), STYLE):  # closed, and listed in the manifest, with the others
            self.paths.append(folder / name)
            self._files.append(open(folder / name, "wb", buffering=1 << 20))  # noqa: SIM115
        self._files[-1].write(style.text().encode())

    def add(self, name: str, ids: Any, *, text_bytes: int, more: bool = False) -> None:
        """ids: list of Encoded, each a conversation of its own"""
        conversations: list[Encoded] = ids
        for each in conversations:
            super().add(name, each.ids, text_bytes=text_bytes)
            self._files[3].write(bytes(each.targets))


def keep_style(tokens: TokenFile, run: RunFolder) -> None:
    """A run keeps how its conversations are written, so that it is talked to in the same way."""
    shutil.copyfile(tokens.path.with_name(STYLE), run.path / STYLE)
    flush(run.path / STYLE)
