"""metrics.jsonl in columns: eight bytes a number, so that a million records fit beside each other."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_MOST_COLUMNS = 64
_MOST_NAME = 100
_NUMBERS = {int, float, type(None)}


def parse_lines(lines: list[bytes]) -> list[dict[str, Any]]:
    """The objects of lines; a damaged line is left out."""
    if not lines:
        return []
    try:
        parsed = json.loads(b"[" + b",".join(lines) + b"]")
        if len(parsed) == len(lines):
            return [each for each in parsed if isinstance(each, dict)]
    except (ValueError, RecursionError):
        pass
    objects = []
    for line in lines:
        try:
            each = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(each, dict):
            objects.append(each)
    return objects


class Columns:
    """One array per name; NaN where a record has no number of that name."""

    def __init__(self) -> None:
        self.rows = 0
        self._arrays: dict[str, Floats] = {}

    def add(self, records: list[dict[str, Any]]) -> None:
        """Append records, which have a number as `step`."""
        first, self.rows = self.rows, self.rows + len(records)
        for name in dict.fromkeys(name for names in set(map(tuple, records)) for name in names):
            if name not in self._arrays and (len(self._arrays) >= _MOST_COLUMNS or len(name) > _MOST_NAME):
                continue
            column = numbers([record.get(name) for record in records])
            if name in self._arrays or not np.isnan(column).all():
                self._grown(name)[first : self.rows] = column

    def _grown(self, name: str) -> Floats:
        before = self._arrays.get(name, np.empty(0))
        if len(before) < self.rows:
            array = np.full(max(256, self.rows * 9 // 8), np.nan)
            array[: len(before)] = before
            self._arrays[name] = array
        return self._arrays[name]

    def cut(self, rows: int) -> None:
        """Forget all rows but the first ones."""
        for array in self._arrays.values():
            array[rows:] = np.nan
        self.rows = rows

    def names(self) -> list[str]:
        """The names of all columns."""
        return list(self._arrays)

    def column(self, name: str, start: int = 0) -> Floats:
        """float64 (rows - start,)"""
        array = self._arrays.get(name)
        if array is None:
            return np.full(self.rows - start, np.nan)
        return self._grown(name)[start : self.rows]

    def last(self, name: str) -> float | None:
        """The last number of a column."""
        for end in range(self.rows, 0, -4096):
            part = self.column(name)[max(0, end - 4096) : end]
            known = np.flatnonzero(np.isfinite(part))
            if len(known):
                return float(part[known[-1]])
        return None


def numbers(values: list[Any]) -> Floats:
    """float64 (n,): NaN for whatever is no number."""
    if set(map(type, values)) <= _NUMBERS:
        try:
            return np.array(values, dtype=np.float64)
        except OverflowError:
            pass
    return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
