"""Records of a run against the same steps computed now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint import Checkpoint, checkpoint_paths, open_checkpoint, read_weights
from drumline.config import refuse_ranks
from drumline.errors import CheckpointError, ConfigError
from drumline.files import RunFolder
from drumline.reasons.again import computed_again
from drumline.reasons.runs import COMPARED, PureRun, check_step
from drumline.report import Record, training_records

TOLERANCE = {"torch.float32": 1e-3}
"""By dtype: how far apart losses may be, relative to their size, if sums were only rounded in another order."""
_COARSE = 1e-2
_NORM_FACTOR = 10
"""Gradient norms may be so many times further apart."""


@dataclass(frozen=True)
class Difference:
    step: int
    name: str
    recorded: Any
    now: Any


@dataclass(frozen=True)
class Replayed:
    """What a replay has found."""

    start: int
    until: int
    ranks: int
    records: int
    """Number of records that were compared."""
    verdict: str
    """same bits, same numbers (records without fingerprints), within rounding, or different"""
    differences: list[Difference]
    reasons: list[str]


def replay(run: PureRun, *, step: int, ranks: int = 1, from_start: bool = False, trusts: bool = False) -> Replayed:
    """Compute the run again from the newest checkpoint before step `step`, counted from 1, and compare every record."""
    check_step(run, step)
    plan = run.config.batch
    most = (plan.global_batch_size or 1) // (plan.batch_size or 1)
    if ranks < 1:
        raise ConfigError(f"--ranks is {ranks}", fix="give --ranks a value of 1 or more")
    if ranks > most:
        refuse_ranks(ranks, most, batch_size=plan.batch_size or 1)
    recorded = run.records()
    start = run.start(step, from_start=from_start)
    begun = start.step if start else 0
    steps = [each for each in recorded if begun < each <= step]
    if not steps:
        last = max(recorded, default=0)
        raise ConfigError(
            f"{run.folder.path} has no record of steps {begun + 1:,} to {step:,} (the last one is of step {last:,})",
            fix="choose a step that was logged, or a later one; --log_every 1 logs every step",
        )
    with computed_again(run, start, until=step, ranks=ranks, trusts=trusts) as copy:
        now = training_records(copy)
        found = [each for at in steps for each in differences(at, recorded[at], now[at])]
        about_now = manifest(copy.checkpoint(step))
        tolerance = TOLERANCE.get(str(about_now.get("device", "")).rpartition(", ")[2], _COARSE)
        verdict = _verdict(found, [recorded[at] for at in steps], tolerance=tolerance)
        reasons = []
        if verdict not in ("same bits", "same numbers"):
            reasons = _reasons(run, start, found, steps, about_now, verdict=verdict, tolerance=tolerance)
        if verdict == "different":
            reasons += _first_tensor(run, start, copy, until=step)
    return Replayed(begun, step, ranks, len(steps), verdict, found, reasons)


def differences(step: int, recorded: Record, now: Record) -> list[Difference]:
    """What both records have, and is not the same."""
    names = [name for name in COMPARED if name in recorded and name in now]
    return [Difference(step, name, recorded[name], now[name]) for name in names if recorded[name] != now[name]]


def _verdict(found: list[Difference], recorded: list[Record], *, tolerance: float) -> str:
    if not found:
        return "same bits" if all("fingerprint" in each for each in recorded) else "same numbers"
    return "within rounding" if all(is_rounding(each, tolerance=tolerance) for each in found) else "different"


def is_rounding(difference: Difference, *, tolerance: float) -> bool:
    """Whether sums in another order explain it; fingerprints say only that there is a difference."""
    if difference.name == "fingerprint":
        return True
    a, b = difference.recorded, difference.now
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        return False
    allowed = tolerance * (_NORM_FACTOR if difference.name == "grad_norm" else 1)
    return abs(a - b) <= allowed * max(abs(a), abs(b))


def _reasons(
    run: PureRun,
    start: Checkpoint | None,
    found: list[Difference],
    steps: list[int],
    about_now: Mapping[str, Any],
    *,
    verdict: str,
    tolerance: float,
) -> list[str]:
    lines = []
    changed = changes(about(run, start), about_now)
    odd = {each.step for each in found}
    after = [each for each in steps if each > max(odd)]
    weights_agree = not any(each.name == "fingerprint" for each in found)
    if verdict == "within rounding" and not run.config.ranks.bitwise:
        lines.append(
            f"the run is not --bitwise: losses within {tolerance:g} and gradient norms within "
            f"{_NORM_FACTOR * tolerance:g} of their size are the rounding of sums in another order"
        )
    elif after or weights_agree:
        named = ", ".join(f"{each:,}" for each in sorted(odd))
        why = (
            f"records of later steps (from {after[0]:,}) have the same bits"
            if after
            else "the weights are the same bits"
        )
        lines.append(f"the record of step {named} was changed: {why}")
        return lines
    if changed:
        lines.append("changed since: " + "; ".join(changed))
    elif verdict == "different" or run.config.ranks.bitwise:
        lines.append(
            "versions and device are those of the run: memory or a chip failed, then or now, code that it uses was "
            "changed (a plug-in, drumline itself), or its records were"
        )
    return lines


def manifest(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says about its making; of a verified one."""
    content: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    return content


def about(run: PureRun, start: Checkpoint | None) -> dict[str, Any]:
    paths = [start.path] if start else list(reversed(checkpoint_paths(run.folder.checkpoints)))
    for path in paths:
        try:
            open_checkpoint(path, read=())
        except CheckpointError:
            continue
        return manifest(path)
    return {}


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Versions, device and dtype that differ between two manifests; what one does not say is not compared."""
    before, after = ({**each.get("versions", {}), "device": each.get("device")} for each in (then, now))
    known = [name for name in before if before[name] is not None and after.get(name) is not None]
    return [f"{name} {before[name]} -> {after[name]}" for name in known if before[name] != after[name]]


def _first_tensor(run: PureRun, start: Checkpoint | None, copy: RunFolder, *, until: int) -> list[str]:
    """The first weight that differs from a checkpoint of the run, if it has one on the way."""
    begun = start.step if start else 0
    saved = [(int(path.name.rpartition("-")[2]), path) for path in checkpoint_paths(run.folder.checkpoints)]
    on_the_way = [(at, path) for at, path in saved if begun < at <= until]
    if not on_the_way:
        return ["which tensor differs first cannot be known: the run has no checkpoint on the way"]
    at, path = on_the_way[0]
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        return [error.problem]
    if at == until:
        return [_compared(path, copy.checkpoint(at), at)]
    with computed_again(run, start, until=at) as other:
        return [_compared(path, other.checkpoint(at), at)]


def _compared(then: Path, now: Path, step: int) -> str:
    before, after = read_weights(then), read_weights(now)
    differ = [name for name in before if name in after and not torch.equal(before[name], after[name])]
    if not differ:
        return f"at step {step:,} the weights of the run's checkpoint are the same bits as now"
    largest = (before[differ[0]].double() - after[differ[0]].double()).abs().max().item()
    return (
        f"at step {step:,} {len(differ)} of {len(before)} tensors differ from the run's checkpoint, first {differ[0]} "
        f"(by {largest:.3g} at most)"
    )
