"""The loss curve of a run, from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.report.records import read_metrics


def plot_loss(metrics: Path, out: Path, *, title: str) -> None:
    """Plot training and validation loss over steps."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), dpi=110)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.98, top=0.92, bottom=0.12)  # to measure the labels would take longer
    training = ("loss", "training", {"lw": 1.0, "alpha": 0.75})
    validation = ("valid_loss", "validation", {"lw": 1.5, "marker": "o", "ms": 4})
    for key, label, style in (training, validation):
        points = [(record["step"], record[key]) for record in records if isinstance(record.get(key), int | float)]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    save_figure(figure, out)


def save_figure(figure: Any, out: Path) -> None:
    """Written atomically."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    aside = out.with_name(f".{out.name}")
    figure.savefig(aside, format="png")
    aside.replace(out)
