"""The console of a run whose length is in epochs."""

from __future__ import annotations

from drumline.report.records import FORMATS, Formats


def with_epochs(epochs: float) -> Formats:
    """Records show the epoch first: epoch 2.50/10."""
    return {"epoch": lambda v: f"epoch {v:.2f}/{epochs:g}", **FORMATS}
