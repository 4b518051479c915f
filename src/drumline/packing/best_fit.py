"""Best fit decreasing, over how many pieces have each length instead of over the pieces.

The longest piece comes first, and each goes into the window that it fills best ("Fewer Truncations Improve Language
Modeling", Ding et al., 2024). Windows with the same content are one group with a count, so that the time depends on
the context and hardly on the number of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Windows of the same content."""

    windows: int
    content: tuple[tuple[int, int], ...]
    """(length, how many pieces of it are in each window), longest first"""

    @property
    def pieces(self) -> int:
        """In each window."""
        return sum(times for _, times in self.content)


def best_fit(counts: Sequence[int], *, context: int) -> list[Group]:
    """Windows of at most `context` tokens for all pieces. counts: of pieces with a length of 0, 1, ..., context"""
    by_space: list[list[Group]] = [[] for _ in range(context + 1)]
    has_space = 0  # bit n: there are windows with n tokens of space
    for length in range(context, 0, -1):
        left = int(counts[length])
        while left:
            fitting = has_space >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                group = by_space[space].pop()
                has_space ^= 0 if by_space[space] else 1 << space
            else:
                space, group = context, Group(left, ())
            # A window that takes one piece has less space than the others: it takes the next one too, if that fits.
            each = min(space // length, left)
            windows = min(group.windows, left // each)
            left -= windows * each
            rest = space - each * length
            by_space[rest].append(Group(windows, (*group.content, (length, each))))
            has_space |= 1 << rest
            if fitting and windows < group.windows:
                by_space[space].append(Group(group.windows - windows, group.content))
                has_space |= 1 << space
    return [group for groups in by_space for group in groups]
