"""Tasks made from held-out text: the same text gives the same items, on any machine and for any model.

next_word:       a passage, and the word that follows it
multiple_choice: a passage, what follows it, and three texts from elsewhere that do not
documents:       the beginning of a document
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from drumline.data import TokenFile
from drumline.evals.scoring import Pair, Scorer

NEXT_WORDS, CHOICES, DOCUMENTS = 200, 100, 100
"""Items of each task, at most."""
_WORD = re.compile(r" [^\W_]+(?!\w)|[\u3040-\u30ff\u3400-\u9fff]")
"""A word with the space before it; in Chinese and Japanese, a character."""
_WORD_WINDOW, _CHOICE_WINDOW, _DOCUMENT_WINDOW = 128, 96, 1024
"""Tokens that an item is made from, at most."""
_CHOICE_WORDS = 10
_TRIES = 4
"""Passages that are looked at for each item: some have no words, or are there already."""
_SEED = 0
Spans = npt.NDArray[np.int64]
"""(documents, 2): where each document starts and ends, without its end-of-text token."""


@dataclass(frozen=True)
class Item:
    task: str
    pairs: tuple[Pair, ...]
    """What the model scores; of several, the first is right."""
    text_bytes: int
    """Length of what is scored first, in UTF-8."""


def make_items(tokens: TokenFile, scorer: Scorer, *, limit: int | None) -> list[Item]:
    """Items of all tasks, each with its own random numbers; limit: at most so many of each task"""
    most = [count if limit is None else min(count, limit) for count in (NEXT_WORDS, CHOICES, DOCUMENTS)]
    spans = _documents(tokens, scorer.tokenizer.end_of_text)
    if not len(spans):
        return []
    return [
        *_next_words(_passages(tokens, spans, scorer, _WORD_WINDOW, most[0]), scorer, most[0]),
        *_choices(_passages(tokens, spans, scorer, _CHOICE_WINDOW, CHOICES), scorer, most[1]),
        *_beginnings(tokens, spans, scorer, most[2]),
    ]


def _documents(tokens: TokenFile, end_of_text: int) -> Spans:
    """In random order."""
    ends = tokens.document_ends
    after = np.flatnonzero(tokens.tokens == end_of_text) + 1 if ends is None else np.asarray(ends, dtype=np.int64)
    starts = np.concatenate([[0], after])
    stops = np.concatenate([after - 1, [len(tokens)]])
    spans = np.stack([starts, stops], axis=1).astype(np.int64)
    spans = spans[spans[:, 1] - spans[:, 0] > 1]
    order = random.Random(_SEED).sample(range(len(spans)), len(spans))
    return spans[order]


def _passages(tokens: TokenFile, spans: Spans, scorer: Scorer, window: int, items: int) -> Iterator[tuple[int, str]]:
    """Random parts of documents, each document in turn, with the position of their first token."""
    draw = random.Random(_SEED)
    for number in range(_TRIES * items):
        start, stop = map(int, spans[number % len(spans)])
        length = min(window, scorer.context, stop - start)
        first = start + draw.randrange(stop - start - length + 1)
        # A part may begin or end within a character.
        text = scorer.tokenizer.decode(tokens.read(first, first + length).tolist())
        yield first, text.strip("\N{REPLACEMENT CHARACTER}")


def _next_words(passages: Iterator[tuple[int, str]], scorer: Scorer, most: int) -> list[Item]:
    draw = random.Random(_SEED)
    items: dict[tuple[str, str], Item] = {}
    for _, text in passages:
        words = [word for word in _WORD.finditer(text, len(text) // 2) if word.end() < len(text)]  # the last may go on
        if words and len(items) < most:
            word = draw.choice(words)
            passage = text[: word.start()]
            pair = scorer.encoded(passage, word.group())
            items[passage, word.group()] = Item("next_word", (pair,), len(word.group().encode()))
    return list(items.values())


def _choices(passages: Iterator[tuple[int, str]], scorer: Scorer, most: int) -> list[Item]:
    draw = random.Random(_SEED)
    follows: dict[str, tuple[int, str]] = {}
    for place, text in passages:
        words = [word.start() for word in _WORD.finditer(text)]
        count = min(_CHOICE_WORDS, len(words) // 3)
        if count and len(follows) < CHOICES:  # also with a limit: the others are needed as wrong answers
            end = draw.randrange(len(words) // 2 + count // 2, len(words))
            follows[text[: words[end - count]]] = place, text[words[end - count] : words[end]]
    items = []
    for passage, (place, right) in list(follows.items())[:most]:
        elsewhere = {text for other, text in follows.values() if abs(other - place) > _CHOICE_WINDOW}
        others = sorted(text for text in elsewhere if not (text.startswith(right) or right.startswith(text)))
        if len(others) >= 3:
            texts = [right, *draw.sample(others, 3)]
            pairs = tuple(scorer.encoded(passage, text) for text in texts)
            items.append(Item("multiple_choice", pairs, len(right.encode())))
    return items


def _beginnings(tokens: TokenFile, spans: Spans, scorer: Scorer, most: int) -> list[Item]:
    items = []
    for start, stop in spans[:most].tolist():
        ids = tokens.read(start, min(stop, start + scorer.context, start + _DOCUMENT_WINDOW)).tolist()
        while len(ids) > 1 and scorer.tokenizer.decode(ids).endswith("\N{REPLACEMENT CHARACTER}"):
            ids.pop()  # it ends within a character
        text_bytes = len(scorer.tokenizer.decode(ids).encode())
        items.append(Item("documents", (([scorer.tokenizer.end_of_text], ids),), text_bytes))
    return items
