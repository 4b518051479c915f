"""lm-evaluation-harness as a client: `local-completions` against a server gives the numbers of `evaluate --tasks`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.stories import write_stories
from helpers.tasks import NAMES, write_tasks
from serve.conftest import serving

from drumline.cli.app import run_command

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("lm_eval", "tenacity", "aiohttp")),
    reason="needs lm-eval and what its clients need (pip install 'lm-eval[api]')",
)
CONTEXT = 96
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
WAYS: list[dict[str, Any]] = [{}, {"batch_size": 4}, {"tokenized_requests": False, "num_concurrent": 3}]
"""Token ids one by one, token ids in batches, and texts at the same time."""


@pytest.fixture
def run(tmp_path: Path, train: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that has learned how a story ends, its export, whose tokenizer a client needs, and tasks."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf/datasets"))
    write_stories(tmp_path / "stories")
    write_tasks(tmp_path / "tasks")
    flags = f"--recipe portable --train_data_path stories --context {CONTEXT} --total_steps 30 --run_dir run"
    assert train(*flags.split()) == 0
    assert run_command(["export", "run", "-o", "exported"]) == 0
    return tmp_path / "run"


def client(url: str, **more: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    # The client keeps a position for a token that it asks for and does not use.
    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="run", tokenizer="exported", max_length=CONTEXT + 1, **more
    )


def own_model(run: Path) -> Any:
    from drumline.evals.harness import _language_model
    from drumline.evals.scoring import scorer_of
    from drumline.generate.loading import load_run

    loaded = load_run(run)
    assert loaded.tokenizer is not None
    return _language_model(scorer_of(loaded.model, loaded.tokenizer, loaded.config, batch_size=5))


def test_local_completions_gives_the_numbers_of_evaluate_and_the_same_answers(run: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

    assert run_command(["evaluate", "run", "--tasks", ",".join(NAMES), "--include_path", "tasks"]) == 0
    (stored,) = (run / "evals").iterdir()
    ours = json.loads(stored.read_text())["tasks"]
    manager = TaskManager(include_path="tasks", include_defaults=False)
    own = own_model(run)
    with serving(run) as server:
        for more in WAYS:
            theirs = simple_evaluate(
                model=client(server.url, **more), tasks=NAMES, task_manager=manager, bootstrap_iters=0
            )
            for task, kind in zip(NAMES, KINDS, strict=True):
                if kind == "loglikelihood_rolling" and "tokenized_requests" in more:
                    continue  # the end of a document that it begins with is a token, and no text means that token
                for metric in (name for name in ours[task]["metrics"] if not name.endswith("stderr")):
                    value = theirs["results"][task][f"{metric},none"]
                    assert value == pytest.approx(ours[task]["metrics"][metric], abs=1e-3)
                samples = theirs["samples"][task]
                requests = [Instance(kind, {}, given, 0) for sample in samples for given in sample["arguments"]]
                answers = [answer[0] for sample in samples for answer in sample["resps"]]
                for mine, answer in zip(getattr(own, kind)(requests), answers, strict=True):
                    assert mine == (answer if kind == "generate_until" else pytest.approx(answer, abs=1e-3))
        assert 0.0 < ours["stories_choice"]["metrics"]["acc"] < 1.0  # neither of them got there by chance
        # The client ignores the token that it asks for, even where that ends the text and is no part of it.
        end = [Instance("loglikelihood", {}, ("Then all was quiet, as it was", " before."), 0)]
        with server.client() as asking:
            whole = asking.completions.create(model="run", prompt="".join(end[0].args), max_tokens=1, temperature=0)
        assert whole.choices[0].finish_reason == "stop"
        assert client(server.url).loglikelihood(end)[0] == pytest.approx(own.loglikelihood(end)[0], abs=1e-3)
