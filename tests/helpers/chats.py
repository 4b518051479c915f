"""Conversations in files, and their tokens."""

import json
from pathlib import Path
from typing import Any

from drumline.chats.packing import ChatTokens
from drumline.chats.preparing import chat_recipe
from drumline.data.corpus import Corpus
from drumline.data.opening import open_tokens
from drumline.data.preparing import Prepared, Recipe, prepare
from drumline.data.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "Answer in one line."}


def talk(*contents: str) -> list[dict[str, str]]:
    """A conversation in which the user and the assistant take turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def write_chats(path: Path, talks: list[Any]) -> str:
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in talks))
    return str(path)


def uneven(count: int) -> list[list[dict[str, str]]]:
    """Conversations with questions and answers of many lengths; some have two turns."""
    talks = [talk(f"What is {n}?" + " Say." * (n % 3), f"It is {n}{' and so on' * (n % 5)}.") for n in range(count)]
    return [[SYSTEM, *each, *talk("More?", "No.")] if n % 3 == 0 else each for n, each in enumerate(talks)]


def prepared(source: str, out: Path, *, tokenizer: Path | None = None, **text: Any) -> Prepared:
    corpus = Corpus(source, **({"valid_fraction": 0.0} | text))
    recipe = Recipe(corpus, Tokenizer.load(tokenizer) if tokenizer else None, 300)
    return prepare(chat_recipe(recipe, tokenizer), out)


def opened(source: str, out: Path, **text: Any) -> ChatTokens:
    tokens = open_tokens(prepared(source, out, **text).path)
    assert isinstance(tokens, ChatTokens)
    return tokens
