"""Which ranks or hosts are the odd ones out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value", bound=Hashable)


def odd_ones(values: Mapping[Key, Value]) -> tuple[Value, list[Key]]:
    """The value that most have, and who has another; on a tie the one that comes first counts as right."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, [key for key, value in values.items() if value != usual]
