"""Options of a custom model: key=value arguments and their values. No torch here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from drumline.config.toml_text import toml_value
from drumline.errors import ConfigError


def plugin_options(words: Iterable[str]) -> dict[str, Any]:
    """Keyword arguments from key=value words, sorted by name; if a key is repeated, the last one counts."""
    options = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ConfigError(
                f"--model_options {word!r} is not of the form key=value", fix="write it as --model_options width=512"
            )
        options[key.strip()] = _parsed(text.strip())
    return dict(sorted(options.items()))


def checked_options(model: str, words: Iterable[str]) -> tuple[str, ...]:
    """The options of a custom model with normalized values, so that configs can be compared."""
    if model == "gpt":
        raise ConfigError(
            f"model_options {' '.join(words)} are for a custom model, not for --model gpt",
            fix="set --model my_module:my_model, or use the options of the GPT, such as --n_layers",
        )
    return tuple(option_words(plugin_options(words)))


def option_words(options: Mapping[str, Any]) -> list[str]:
    """The same options as words, each also a line of a TOML table."""
    return [f"{key}={toml_value(value)}" for key, value in options.items()]


def _parsed(text: str) -> Any:
    """A TOML number, boolean, string or array; any other text is a string."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    return value if len(table) == 1 and isinstance(value, bool | int | float | str | list) else text
