"""Benchmark results as text: lines and table rows of at most 80 characters."""

from __future__ import annotations

from drumline.bench.bench import Report
from drumline.report import command
from drumline.units import count, counted

PART_COLUMNS = ("part of a step", "ms", "share")
ALL_REDUCE_COLUMNS = ("all-reduce of", "ms", "per rank")
TABLE_COLUMNS = ("preset", "batch_size", "steps/s", "tokens/s", "MFU", "peak memory")


def summary(report: Report) -> list[str]:
    """What was measured, and its throughput."""
    ceiling = count(report.ceilings.flops_per_s)
    compiled = ", compiled" if report.compiled else ""
    lines = [
        f"{report.device:<12} {report.device_name}",
        f"{'model':<12} {report.preset}: {count(report.parameters)} parameters, {report.dtype}{compiled}",
        f"{'step':<12} {report.global_batch_size} sequences x {report.context} = {report.tokens_per_step:,} tokens: "
        f"{report.micro_batches} x batch_size {report.batch_size} on {counted(report.ranks, 'rank')}",
        f"{'throughput':<12} {report.steps_per_s:.2f} steps/s, {count(report.tokens_per_s)} tokens/s",
        f"{'MFU':<12} {report.mfu:.1%} of {ceiling}FLOP/s per rank ({report.mfu_of})",
        f"{'peak memory':<12} {count(report.peak_memory_bytes)}B",
        f"{'limits':<12} matmul {count(report.ceilings.matmul_flops_per_s)}FLOP/s, "
        f"copy {count(report.ceilings.copy_bytes_per_s)}B/s",
    ]
    if report.search is not None:
        whole = report.batch_size * report.ranks == report.global_batch_size
        which = "a rank's whole share of the step, fits" if whole else "the largest that fits"
        limit = count(report.search.limit_bytes)
        lines += [
            f"{'batch_size':<12} {report.batch_size}, {which} in {limit}B; to train with it:",
            f"  {command('train', '--preset', report.preset, '--batch_size', report.batch_size)} "
            f"--global_batch_size {report.global_batch_size}",
        ]
    return lines


def part_rows(report: Report) -> list[tuple[str, ...]]:
    """For PART_COLUMNS."""
    parts = {**report.parts_s, "together": report.step_s}
    if not parts["gradient_wait"]:  # a single process has no other rank to wait for
        del parts["gradient_wait"]
    return [
        (name.replace("_", " "), f"{took_s * 1e3:.2f}", f"{took_s / report.step_s:.1%}")
        for name, took_s in parts.items()
    ]


def all_reduce_rows(report: Report) -> list[tuple[str, ...]]:
    """For ALL_REDUCE_COLUMNS."""
    return [
        (_binary(each.bytes), f"{each.seconds * 1e3:.2f}", f"{count(each.bytes_per_s)}B/s")
        for each in report.all_reduce
    ]


def table_rows(report: Report) -> list[tuple[str, ...]]:
    """For TABLE_COLUMNS."""
    rows: list[tuple[str, ...]] = []
    for row in report.table:
        if row.steps_per_s is None or row.tokens_per_s is None or row.mfu is None or row.peak_memory_bytes is None:
            rows.append((row.preset, str(row.batch_size), "-", "-", "-", "does not fit"))
            continue
        speeds = (f"{row.steps_per_s:.2f}", count(row.tokens_per_s), f"{row.mfu:.1%}")
        rows.append((row.preset, str(row.batch_size), *speeds, f"{count(row.peak_memory_bytes)}B"))
    return rows


def _binary(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"
