"""Two runs: what differs in settings, data and versions, where their records part, and in which tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from drumline.checkpoint import Checkpoint, open_checkpoint
from drumline.errors import ConfigError
from drumline.files import origin
from drumline.reasons.again import computed_again
from drumline.reasons.probing import Trace, traced
from drumline.reasons.replaying import about, changes, differences
from drumline.reasons.runs import PureRun
from drumline.report import Record, training_records

_NOT_COMPARED = ("run_dir", "resume_from", "allow_change")


@dataclass
class Diff:
    """What was found, as lines."""

    facts: list[str] = field(default_factory=list)
    """Settings, data, versions."""
    parts_at: int | None = None
    """The first recorded step whose records differ."""
    records: list[str] = field(default_factory=list)
    tensor: list[str] = field(default_factory=list)
    """The first tensor that differs, or why it cannot be named."""


def diff_runs(a: PureRun, b: PureRun, *, trusts: bool = False) -> Diff:
    """Compare two runs, and compute the step again where they part."""
    found = Diff(facts=[*_settings(a, b), *_data(a, b), *_versions(a, b)])
    records_a, records_b = a.records(), b.records()
    common = sorted(records_a.keys() & records_b.keys())
    if not common:
        raise ConfigError(
            f"{a.folder.path} and {b.folder.path} have no record of the same step",
            fix="train both further, or with the same --log_every",
        )
    parts = next((at for at in common if differences(at, records_a[at], records_b[at])), None)
    if parts is None:
        found.records.append(f"the same in all {len(common)} steps that both have records of")
        return found
    found.parts_at = parts
    same = max((at for at in common if at < parts), default=0)
    found.records = _shown(parts, records_a[parts], records_b[parts], same)
    found.tensor = _traced(a, b, same=same, parts=parts)
    return found


def _settings(a: PureRun, b: PureRun) -> list[str]:
    one, two = ({k: v for part in asdict(run.config).values() for k, v in part.items()} for run in (a, b))
    names = [name for name in one if name not in _NOT_COMPARED and one[name] != two[name]]
    return [f"setting {name}: {one[name]} / {two[name]}" for name in names]


def _data(a: PureRun, b: PureRun) -> list[str]:
    one, two = origin(a.folder), origin(b.folder)
    names = [name for name in ("sha256", "tokens") if one.get(name) != two.get(name)]
    return [f"data {name}: {one.get(name)} / {two.get(name)}" for name in names]


def _versions(a: PureRun, b: PureRun) -> list[str]:
    return [f"version {each.replace(' -> ', ' / ')}" for each in changes(about(a, None), about(b, None))]


def _shown(step: int, one: Record, two: Record, same: int) -> list[str]:
    lines = [f"{d.name}: {d.recorded} / {d.now}" for d in differences(step, one, two)]
    before = f"the last one that is the same is of step {same:,}" if same else "no earlier one is the same"
    return [f"records part at step {step:,}; {before}", *lines]


def _traced(a: PureRun, b: PureRun, *, same: int, parts: int) -> list[str]:
    """Compute both runs again to where they part, then that step tensor by tensor."""
    starts = [run.start(same + 1, from_start=True) for run in (a, b)]
    computed = [_again(run, start, until=parts) for run, start in zip((a, b), starts, strict=True)]
    lines = []
    for run, records in zip((a, b), computed, strict=True):
        own = differences(parts, run.records()[parts], records[parts])
        if own:
            names = ", ".join(f"{each.name} {each.recorded} then, {each.now} now" for each in own)
            lines.append(f"{run.folder.path} does not give its record of step {parts:,} again: {names}")
    steps = sorted(at for at in computed[0].keys() & computed[1].keys() if same < at)
    first = next((at for at in steps if differences(at, computed[0][at], computed[1][at])), None)
    if first is None:
        why = "what made their records differ is not in their settings, data and code as they are here now"
        return [*lines, f"computed again in one process, both give the same bits up to step {parts:,}: {why}"]
    lines.append(f"computed again, they part in step {first:,}")
    return lines + _compared(a, b, starts, step=first)


def _again(run: PureRun, start: Checkpoint | None, *, until: int) -> dict[int, Record]:
    with computed_again(run, start, until=until) as folder:
        return training_records(folder)


def _compared(a: PureRun, b: PureRun, starts: list[Checkpoint | None], *, step: int) -> list[str]:
    with _before(a, starts[0], step) as of_a, _before(b, starts[1], step) as of_b:
        one, two = (traced(run, start, step=step - 1) for run, start in ((a, of_a), (b, of_b)))
        index = _first(one, two)
        if index is None:
            return [
                f"every tensor of step {step:,} has the same bits in one process: the difference is in how ranks add"
            ]
        seen, other = one.seen[index], two.seen[index]
        if (seen.kind, seen.name) != (other.kind, other.name):
            return [f"their models are not alike: {seen.name} / {other.name} is the first tensor with another name"]
        tensors = [traced(run, start, step=step - 1, keep=index).kept for run, start in ((a, of_a), (b, of_b))]
    before = [each for each in one.seen[:index] if each.kind == seen.kind]
    line = f"first tensor that differs: {seen.kind}: {seen.name}{_size(tensors)}"
    return [line, f"last tensor before it, the same in both: {before[-1].name}"] if before else [line]


def _first(one: Trace, two: Trace) -> int | None:
    pairs = enumerate(zip(one.seen, two.seen, strict=False))
    found = next((index for index, (mine, other) in pairs if mine != other), None)
    shorter = min(len(one.seen), len(two.seen))
    return found if found is not None or len(one.seen) == len(two.seen) else shorter - 1


def _size(tensors: list[Any]) -> str:
    one, two = tensors
    if one is None or two is None or one.shape != two.shape:
        return "" if one is None or two is None else f", of shape {tuple(one.shape)} / {tuple(two.shape)}"
    one, two = one.double(), two.double()
    most, scale = (one - two).abs().max().item(), one.abs().max().item()
    return f", by {most:.3g} at most, where the largest value is {scale:.3g}"


@contextmanager
def _before(run: PureRun, start: Checkpoint | None, step: int) -> Iterator[Checkpoint | None]:
    """A checkpoint of the step before; None: the initial weights."""
    if (start.step if start else 0) == step - 1:
        yield start
        return
    with computed_again(run, start, until=step - 1) as folder:
        yield open_checkpoint(folder.checkpoint(step - 1))
