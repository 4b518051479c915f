"""The tasks of one command: load the run, measure, store the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from drumline.config import Device
from drumline.errors import ConfigError
from drumline.evals.builtin import BUILTIN, items_for, measured
from drumline.evals.results import Result, store, track
from drumline.evals.scoring import scorer_of
from drumline.generate import held_out, load_run, scoring_run
from drumline.parallel import Place, World
from drumline.report import progress_of


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Which tasks, and how much of them."""

    tasks: str
    """builtin, and names of the harness, separated by commas."""
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    data: str | None = None
    split: str = "valid"

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("--tasks names no task", fix="give --tasks builtin, or names separated by commas")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit {self.limit} leaves no items", fix="give --limit a value of 1 or more")

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.tasks.split(",") if name.strip()))


def evaluate_tasks(
    path: Path, settings: TaskSettings, *, batch_size: int, device: Device, trusts: bool = False
) -> tuple[int, list[Result], Path | None]:
    """The step of a run's newest checkpoint, its results, and the file that they were written to."""
    run = load_run(path, trusts=trusts)
    model, tokenizer = scoring_run(run, path, device=device)
    scorer = scorer_of(model, tokenizer, run.config, batch_size=batch_size)
    results: list[Result] = []
    others = [name for name in settings.names if name != BUILTIN]
    if others:  # first: what is not installed, or cannot be downloaded, is said at once
        from drumline.evals.harness import harness_results

        results += harness_results(
            scorer,
            others,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            include_path=settings.include_path,
        )
    if BUILTIN in settings.names:
        tokens = held_out(run, path, data=settings.data, split=settings.split, trusts=trusts)
        items = items_for(tokens, scorer, limit=settings.limit)
        total = scorer.batches(sum(len(item.pairs) for item in items))
        with progress_of("evaluating batch", total=total) as batch_done:
            own = measured(scorer, items, World(Place(), scorer.device), each_batch=batch_done)
        about = {"limit": settings.limit, "data_sha256": tokens.sha256}
        results += [replace(result, settings=about) for result in own]
    if run.is_model:
        return run.step, results, None  # its folder is not ours
    stored = store(results, run.folder, run.step)
    track(results, run.config, run.folder, run.step, trusts=trusts)
    return run.step, results, stored
