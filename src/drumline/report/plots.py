"""The curves of a run as a picture, from metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.report.records import read_metrics

_CURVES = {
    "loss (nats per token)": ("loss", "valid_loss"),
    "learning rate": ("lr",),
    "gradient norm": ("grad_norm",),
    "tokens per second": ("tokens_per_s",),
    "samples per second": ("samples_per_s",),
    "MFU": ("mfu",),
}
"""What is drawn, if a run has it; the loss is drawn in any case."""
_STYLE: dict[str, Any] = {"label": "training", "lw": 1.0, "alpha": 0.75}
_STYLES: dict[str, dict[str, Any]] = {"valid_loss": {"label": "validation", "lw": 1.5, "marker": "o", "ms": 4}}


def plot_curves(metrics: Path, out: Path, *, title: str) -> None:
    """Plot losses and the other curves of a run over its steps."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    curves = {
        name: {key: points for key in keys if (points := _points(records, key)) or key == "loss"}
        for name, keys in _CURVES.items()
    }
    curves = {name: lines for name, lines in curves.items() if lines}
    rows = 1 + len(curves) // 2
    figure = Figure(figsize=(9, 3.4 + 2.2 * (rows - 1)), dpi=110, layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(rows, 2, height_ratios=[1.6, *[1.0] * (rows - 1)])
    for place, (name, lines) in enumerate(curves.items()):
        axes = figure.add_subplot(grid[0, :] if place == 0 else grid[(place + 1) // 2, (place + 1) % 2])
        for key, points in lines.items():
            if points:
                axes.plot(*zip(*points, strict=True), **_STYLES.get(key, _STYLE))
        axes.set(xlabel="step", ylabel=name)
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    save_figure(figure, out)


def _points(records: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(record["step"], record[key]) for record in records if isinstance(record.get(key), int | float)]


def save_figure(figure: Any, out: Path) -> None:
    """Written atomically."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    aside = out.with_name(f".{out.name}")
    figure.savefig(aside, format="png")
    aside.replace(out)
