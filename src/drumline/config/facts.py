"""How a setting is declared: its default, other facts about it, and shared checks. No torch."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, Literal, TypeVar, get_type_hints

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


def names_with(fact: Literal["may_change", "per_host"]) -> frozenset[str]:
    """The settings that were declared with a fact."""
    from drumline.config.settings import TrainConfig

    kinds = get_type_hints(TrainConfig).values()
    return frozenset(each.name for kind in kinds for each in fields(kind) if each.metadata.get(fact))


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
