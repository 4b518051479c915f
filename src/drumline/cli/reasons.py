"""`drumline blame`, `replay` and `diff`: why the steps of a run were as they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from drumline.errors import EXIT_FAILED, ConfigError
from drumline.units import counted

if TYPE_CHECKING:
    from drumline.reasons import Blamed, Part

_Flag = Annotated[bool, Parameter(negative=())]


def blame(
    run: Path,
    /,
    *,
    step: int,
    losses: _Flag = False,
    decode: _Flag = False,
    exclude: tuple[str, ...] = (),
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    top: int = 20,
    rollbacks: int | None = None,
    from_start: _Flag = False,
    trust: _Flag = False,
) -> int:
    """List the documents of a step, by what they did to its loss, and make a list of those to leave out.

    Which they are is computed from the config, the data and the step: no log of
    them is needed.

    Parameters
    ----------
    run
        Run folder.
    step
        Number of the step, as in log lines.
    losses
        Compute the step again, from the checkpoint before it: loss and gradient norm of each document.
    decode
        Print the text.
    exclude
        Document to leave out, by its number in the list or its name: writes a skip list. May be repeated.
    out
        File of the skip list. Default: skip_list.json in the run folder.
    top
        Number of rows.
    rollbacks
        For a step that was computed several times: as it was after this many rollbacks. Default: all.
    from_start
        If there is no checkpoint before the step: compute all steps before it again.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    """
    _quiet()
    from drumline.reasons import batches_of, chosen, open_run, recomputed, with_rollbacks, write_skip_list
    from drumline.reasons import blame as blamed
    from drumline.report import print_line

    opened = with_rollbacks(open_run(run, trusts=trust), rollbacks)
    data, batches = batches_of(opened)
    if exclude and data.mix is not None:
        raise ConfigError(
            f"--exclude writes a list for one folder of tokens, and {run} has a mix of {len(data.mix.sources)}",
            fix="prepare the folder again without the document, for a new run",
        )
    parts = blamed(opened, data.train, batches, step=step)
    names = len({(part.start, part.stop) for part in parts})
    number = f"{counted(len(parts), 'part')} of {counted(names, 'document')}"
    print_line(f"step {step:,} of {opened.folder.path}: {number}")
    if opened.detours and rollbacks is None:
        print_line(f"after {len(opened.detours)} rollbacks; --rollbacks 0: as it was before the first")
    found: list[Blamed] = []
    if losses:
        result = recomputed(opened, data.train, parts, step=step, from_start=from_start)
        found, parts = result.parts, [each.part for each in result.parts]
        recorded = opened.records().get(step, {}).get("loss")
        print_line(f"loss {result.loss:.4f} computed again" + (f", {recorded:.4f} recorded" if recorded else ""))
    _print_parts(parts, found, top=top, data=data if decode else None)
    if exclude:
        path = out or opened.folder.path / "skip_list.json"
        own = opened.config.data.skip_list
        listed = write_skip_list(path, data.train, chosen(parts, exclude), also=Path(own) if own else None)
        number = counted(len(listed.documents), "document")
        print_line(f"wrote {path}: {number}, left out by a new run with --skip_list {path}")
    return 0


def replay(run: Path, /, *, step: int, ranks: int = 1, from_start: _Flag = False, trust: _Flag = False) -> int:
    """Compute the steps of a run again, up to a step, and compare every record on the way.

    From the newest checkpoint before the step, in a temporary copy: the run itself
    is only read.

    Parameters
    ----------
    run
        Run folder.
    step
        Number of the step, as in log lines.
    ranks
        Number of ranks.
    from_start
        If there is no checkpoint before the step: begin with the initial weights.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    """
    _quiet()
    from drumline.reasons import open_run
    from drumline.reasons import replay as replayed
    from drumline.report import print_line

    found = replayed(open_run(run, trusts=trust), step=step, ranks=ranks, from_start=from_start, trusts=trust)
    steps = f"steps {found.start + 1:,} to {found.until:,} of {run}"
    compared = f"{counted(found.records, 'record')} compared, on {counted(found.ranks, 'rank')}"
    print_line(f"{steps}: {found.verdict} ({compared})")
    for each in found.differences[:6]:
        print_line(f"  step {each.step:,} {each.name}: {each.recorded} recorded, {each.now} now")
    if len(found.differences) > 6:
        print_line(f"  and {len(found.differences) - 6} more")
    for reason in found.reasons:
        print_line(f"  {reason}")
    return EXIT_FAILED if found.verdict == "different" else 0


def diff(run_a: Path, run_b: Path, /, *, trust: _Flag = False) -> int:
    """Find where two runs part: settings, data, versions, the first step, and in it the first tensor.

    Parameters
    ----------
    run_a
        Run folder.
    run_b
        The other one.
    trust
        Run installed code that the config of a run from elsewhere names (package.module:name).
    """
    _quiet()
    from drumline.reasons import diff_runs, open_run
    from drumline.report import print_line

    found = diff_runs(open_run(run_a, trusts=trust), open_run(run_b, trusts=trust))
    print_line(f"{run_a} / {run_b}")
    for line in (*(found.facts or ["settings, data and versions are the same"]), *found.records, *found.tensor):
        print_line(line)
    return 0


def _quiet() -> None:
    """Must be set before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _print_parts(parts: list[Part], found: list[Blamed], *, top: int, data: Any) -> None:
    from drumline.reasons import decoded
    from drumline.report import print_line

    if data is not None and data.tokenizer is None:
        raise ConfigError("the run has no tokenizer, so its tokens cannot be decoded", fix="drop --decode")
    by_norm = sorted(found, key=lambda each: -each.grad_norm)
    rank = {id(each): number for number, each in enumerate(by_norm, 1)}
    head = ["loss", "step without", "gradient", "its rank"] if found else []
    print_line("   #" + "".join(f"{name:>14}" for name in [*head, "tokens"]) + "  document")
    for number, part in enumerate(parts[:top], 1):
        cells = []
        if found:
            own = found[number - 1]
            cells = [f"{own.loss:.4f}", f"{own.loss_without:.4f}", f"{own.grad_norm:.4g}", str(rank[id(own)])]
        cells.append(str(part.last - part.first))
        place = f"{_visible(part.document)} (tokens {part.first:,} to {part.last - 1:,})"
        print_line(f"{number:>4}" + "".join(f"{cell:>14}" for cell in cells) + f"  {place}")
        if data is not None:
            print_line("      | " + _visible(decoded(part, data.train, data.tokenizer)))
    if len(parts) > top:
        print_line(f"and {len(parts) - top} more: --top {len(parts)}")


def _visible(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    from drumline.generate import VISIBLE

    return text.replace("\n", "\\n").replace("\t", "\\t").translate(VISIBLE)
