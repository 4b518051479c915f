"""How a setting is declared: its default, other facts about it, and shared checks. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import field
from typing import Any, TypeVar

from drumline.errors import ConfigError

T = TypeVar("T")
ANY = object()


def setting(default: T, *, may_change: bool = False, per_host: bool = False, fused: Any = None) -> T:
    """The default of a setting, with facts that other modules need. A plain default has none of them.

    may_change: it may change when a run is resumed, since it does not affect what a step computes
    per_host:   it may differ between the hosts of a run
    fused:      the value of a model option for which the fused kernels work, or ANY; the default otherwise
    """
    facts = {"may_change": may_change, "per_host": per_host, "fused": default if fused is None else fused}
    return field(default=default, metadata=facts)


def check(settings: object, **rules: bool) -> None:
    """Refuse the first setting whose rule is violated."""
    for name in (name for name, holds in rules.items() if not holds):
        from drumline.config.ranges import refuse

        refuse(settings, name)


def check_positive(settings: object, *names: str) -> None:
    """Refuse a setting that is less than 1."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}", fix=f"give --{name} a value of 1 or more")


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str, flag: str = "") -> str:
    """The known name closest to a misspelled one, as a question; `otherwise` if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {flag}{close[0]}?" if close else otherwise
