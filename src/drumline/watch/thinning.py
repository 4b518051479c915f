"""Many points -> few, with the smallest and the largest of each bucket, so that no spike is lost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def thin(y: Floats, *, buckets: int) -> npt.NDArray[np.int64]:
    """Positions to keep, in order: the first, the last, and of each bucket the smallest and the largest value.

    y: finite (n,)
    """
    n = len(y)
    if n <= 2 * buckets:
        return np.arange(n)
    size = -(-n // buckets)
    rows = -(-n // size)
    starts = np.arange(rows) * size
    padded = np.full(rows * size, np.inf)
    padded[:n] = y
    lowest = starts + padded.reshape(rows, size).argmin(axis=1)
    padded[n:] = -np.inf
    highest = starts + padded.reshape(rows, size).argmax(axis=1)
    return np.unique(np.concatenate([lowest, highest, [0, n - 1]]))


def bucket_means(x: Floats, y: Floats, *, buckets: int) -> tuple[Floats, Floats]:
    """The mean x and y of the same buckets, for a smooth line: the points themselves if they are few.

    x, y: finite (n,)
    """
    n = len(y)
    if n <= 2 * buckets:
        return x, y
    size = -(-n // buckets)
    starts = np.arange(0, n, size)
    counts = np.diff(np.append(starts, n))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts


def curve(x: Floats, y: Floats, *, buckets: int, low: float, high: float) -> dict[str, list[float]]:
    """Points between two x, thinned: x and y with all extremes, mx and my the means of the buckets."""
    inside = np.isfinite(x) & np.isfinite(y) & (x >= low) & (x <= high)
    x, y = x[inside], y[inside]
    if np.any(x[1:] < x[:-1]):  # records that somebody has joined from two runs
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    kept = thin(y, buckets=buckets)
    mean_x, mean_y = bucket_means(x, y, buckets=buckets)
    return {"x": x[kept].tolist(), "y": y[kept].tolist(), "mx": mean_x.tolist(), "my": mean_y.tolist()}
