"""Flags in a command line that is not parsed yet. No torch here."""

from __future__ import annotations

from collections.abc import Sequence


def flag(words: Sequence[str], name: str) -> str | None:
    """The value of --name; the last one if it is repeated."""
    last = None
    for index, word in enumerate(words):
        given, equals, value = word.partition("=")
        if given.startswith("--") and given[2:].replace("-", "_") == name:
            last = value if equals else next(iter(words[index + 1 : index + 2]), "")
    return last
