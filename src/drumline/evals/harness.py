"""Tasks of lm-evaluation-harness, with drumline's own model: no export, and no transformers in between."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.config import did_you_mean
from drumline.errors import ConfigError, MissingExtraError
from drumline.evals.generating import continuations
from drumline.evals.results import Result
from drumline.evals.scoring import Pair, Score, Scorer
from drumline.generate import SampleConfig
from drumline.report import progress_of

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

_MAX_TOKENS = 256
"""Tokens to generate, unless a task says otherwise."""


def harness_results(
    scorer: Scorer,
    tasks: Sequence[str],
    *,
    limit: int | None,
    num_fewshot: int | None,
    include_path: Path | None,
) -> list[Result]:
    """Results of these tasks, and of the tasks of which those that are groups consist."""
    try:
        from lm_eval import simple_evaluate
    except ImportError:
        raise MissingExtraError(f"--tasks {','.join(tasks)}", extra="eval") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _task_manager(tasks, include_path)
    output = simple_evaluate(
        model=_language_model(scorer),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        log_samples=False,
        bootstrap_iters=1000,
    )
    settings = {"limit": limit, "harness": _version()}
    shots, samples = output.get("n-shot", {}), output.get("n-samples", {})
    return [
        Result(
            task,
            int(samples.get(task, {}).get("effective", 0)),
            _numbers(metrics),
            settings | {"num_fewshot": shots.get(task), "version": output.get("versions", {}).get(task)},
        )
        for task, metrics in output["results"].items()
    ]


def _version() -> str:
    from importlib.metadata import version

    return version("lm_eval")


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """acc,none and acc_stderr,none -> acc and acc_stderr; other filters stay part of the name."""
    numbers = {}
    for key, value in metrics.items():
        name, _, how = key.partition(",")
        if how and isinstance(value, int | float):
            metric, is_error = name.removesuffix("_stderr"), name.endswith("_stderr")
            full = metric if how == "none" else f"{metric}_{how}"
            numbers[f"{full}_stderr" if is_error else full] = float(value)
    return numbers


def _task_manager(tasks: Sequence[str], include_path: Path | None) -> TaskManager:
    from lm_eval.tasks import TaskManager

    class Tasks(TaskManager):  # type: ignore[misc]
        def load(self, names: Any) -> Any:
            try:
                return super().load(names)
            except Exception as error:
                why = (str(error).strip().splitlines() or [""])[0][:200]
                raise ConfigError(
                    f"the task {', '.join(map(str, names))} cannot be loaded: {type(error).__name__}: {why}",
                    fix="its data are downloaded on first use: run this once with a network, or use --tasks builtin, "
                    "or a task of your own with local files (--include_path)",
                ) from None

    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"{include_path} is not a folder", fix="give --include_path a folder of .yaml files")
    manager = Tasks(include_path=None if include_path is None else str(include_path))
    for task in tasks:
        if not manager.match_tasks([task]):
            listed = "see all of them: lm_eval ls tasks; your own: --include_path FOLDER"
            raise ConfigError(
                f"there is no task {task!r}", fix=did_you_mean(task, ["builtin", *manager.all_tasks], otherwise=listed)
            )
    return manager


def _language_model(scorer: Scorer) -> LM:
    """A model for the harness."""
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class LanguageModel(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            pairs = [scorer.encoded(*request.args) for request in requests]
            return [(score.nats, score.is_greedy) for score in _shown(scorer, pairs)]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            pairs: list[Pair] = []
            counts = []
            for (text,) in (request.args for request in requests):
                windows = get_rolling_token_windows(
                    scorer.tokenizer.encode(text), scorer.tokenizer.end_of_text, scorer.context, context_len=1
                )
                own = [make_disjoint_window(window) for window in windows]
                pairs += own
                counts.append(len(own))
            scores = iter(_shown(scorer, pairs))
            return [sum(next(scores).nats for _ in range(count)) for count in counts]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            alike: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                alike.setdefault(repr(request.args[1]), []).append(index)
            written: dict[int, str] = {}
            for indices in alike.values():
                until, settings = _generation(requests[indices[0]].args[1])
                prompts = [requests[index].args[0] for index in indices]
                written |= zip(indices, continuations(scorer, prompts, until=until, settings=settings), strict=True)
            return [written[index] for index in range(len(requests))]

    return LanguageModel()


def _shown(scorer: Scorer, pairs: Sequence[Pair]) -> list[Score]:
    with progress_of("scoring batch", total=scorer.batches(len(pairs))) as batch_done:
        return scorer.scores(pairs, each_batch=batch_done)


def _generation(given: dict[str, Any]) -> tuple[list[str], SampleConfig]:
    """Stop strings and sampling parameters of a task; greedy unless it samples."""
    until = given.get("until") or []
    temperature = float(given.get("temperature") or 0.0) if given.get("do_sample") else 0.0
    return [until] if isinstance(until, str) else list(until), SampleConfig(
        temperature=temperature,
        top_k=given.get("top_k") or None,
        top_p=given.get("top_p") or None,
        max_tokens=int(given.get("max_gen_toks") or given.get("max_new_tokens") or _MAX_TOKENS),
    )
