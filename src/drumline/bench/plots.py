"""The plot of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.report import save_figure
from drumline.units import count


def plot_bench(report: Mapping[str, Any], out: Path) -> None:
    """Plot a benchmark report, as in --json: parts of a step, the table, and all-reduce with several ranks."""
    from matplotlib.figure import Figure

    panels = [_parts_panel]
    if any(row["fits"] for row in report["table"]):
        panels.append(_table_panel)
    if report["all_reduce"]:
        panels.append(_all_reduce_panel)
    figure = Figure(figsize=(5.5 * len(panels), 4.5), dpi=110, layout="tight")
    axes = figure.subplots(1, len(panels), squeeze=False)
    for draw, where in zip(panels, axes[0], strict=True):
        draw(report, where)
    ranks = f"{report['ranks']} rank{'s' if report['ranks'] > 1 else ''}"
    figure.suptitle(
        f"{report['preset']} on {report['device']}, {report['dtype']}, {ranks}: "
        f"{count(report['tokens_per_s'])} tokens/s, MFU {report['mfu']:.0%} ({report['mfu_of']})"
    )
    save_figure(figure, out)


def _parts_panel(report: Mapping[str, Any], axes: Any) -> None:
    """Time per part of a step, as bars."""
    parts = {name: took_s for name, took_s in report["parts_s"].items() if name != "gradient_wait" or took_s > 0}
    names = [name.replace("_", " ") for name in parts]
    bars = axes.barh(names, [took_s * 1e3 for took_s in parts.values()], color="tab:blue", height=0.6)
    shares = [f"{took_s * 1e3:.2f} ms ({took_s / report['step_s']:.0%})" for took_s in parts.values()]
    axes.bar_label(bars, labels=shares, padding=4)
    axes.set(title=f"one step of {report['tokens_per_step']:,} tokens", xlabel="ms")
    axes.set_xlim(0, 1.45e3 * max(parts.values()))  # room for the labels
    axes.invert_yaxis()


def _table_panel(report: Mapping[str, Any], axes: Any) -> None:
    """Throughput over batch size, one line per preset; sizes that do not fit are left out."""
    for name in dict.fromkeys(row["preset"] for row in report["table"]):
        fitting = [row for row in report["table"] if row["preset"] == name and row["fits"]]
        speeds = [row["tokens_per_s"] / 1e3 for row in fitting]
        axes.plot([row["batch_size"] for row in fitting], speeds, marker="o", label=name)
    sizes = sorted({row["batch_size"] for row in report["table"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set(title="throughput by batch size", xlabel="batch_size (sequences)", ylabel="1000 tokens/s")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _all_reduce_panel(report: Mapping[str, Any], axes: Any) -> None:
    """All-reduce bandwidth by size."""
    all_reduces = report["all_reduce"]
    sizes = [each["bytes"] / 2**20 for each in all_reduces]
    axes.plot(sizes, [each["bytes_per_s"] / 1e9 for each in all_reduces], marker="o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set_ylim(bottom=0)
    axes.set(title=f"all-reduce over {report['ranks']} ranks", xlabel="MiB", ylabel="GB/s per rank")
    axes.grid(alpha=0.3)
