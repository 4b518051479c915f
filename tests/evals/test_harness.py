"""lm-evaluation-harness on a run: without an export, and the numbers that it gives on an exported one."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.stories import write_stories
from helpers.tasks import CHOICE, HAS_HARNESS, NAMES, write_tasks

from drumline.cli.app import run_command

NEEDS_HARNESS = pytest.mark.skipif(
    not HAS_HARNESS, reason="needs lm-eval and accelerate (pip install 'drumline[eval]' accelerate)"
)


@pytest.fixture
def run(tmp_path: Path, train: Callable[..., int]) -> Path:
    write_stories(tmp_path / "stories")
    flags = "--recipe portable --train_data_path stories --context 48 --total_steps 10 --run_dir run"
    assert train(*flags.split()) == 0
    return tmp_path / "run"


@NEEDS_HARNESS
def test_the_harness_gives_the_numbers_that_it_gives_through_transformers_on_the_exported_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf/datasets"))
    write_tasks(tmp_path / "tasks")
    words = ["--tasks", ",".join(NAMES), "--include_path", "tasks", "--batch_size", "5"]
    assert run_command(["evaluate", "run", *words]) == 0
    (stored,) = (run / "evals").iterdir()
    ours: dict[str, Any] = json.loads(stored.read_text())["tasks"]
    assert run_command(["export", "run", "-o", "exported"]) == 0

    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    theirs = simple_evaluate(
        model=HFLM(pretrained="exported", device="cpu", dtype="float32", batch_size=4),
        tasks=NAMES,
        task_manager=TaskManager(include_path="tasks", include_defaults=False),
        log_samples=True,
    )
    for task in NAMES:
        metrics = ours[task]["metrics"]
        assert ours[task]["items"] == 12
        for metric in metrics:
            assert metrics[metric] == pytest.approx(theirs["results"][task][f"{metric},none"], abs=1e-3, nan_ok=True)
    assert 0.0 < ours["stories_choice"]["metrics"]["acc"] < 1.0  # neither of them got there by chance
    same_by_request(run, theirs["samples"])


def same_by_request(run: Path, samples: dict[str, Any]) -> None:
    """Each log-likelihood and each text, not only what becomes of them in the end."""
    from lm_eval.api.instance import Instance

    from drumline.evals.harness import _language_model
    from drumline.evals.scoring import Scorer
    from drumline.generate.loading import load_run

    loaded = load_run(run)
    assert loaded.tokenizer is not None
    model = _language_model(Scorer(model=loaded.model, tokenizer=loaded.tokenizer, context=48, batch_size=5))
    for task, kind in zip(NAMES, ("loglikelihood", "loglikelihood_rolling", "generate_until"), strict=True):
        requests = [
            (arguments, answers[0])
            for sample in samples[task]
            for arguments, answers in zip(sample["arguments"], sample["resps"], strict=True)
        ]
        instances = [Instance(kind, {}, arguments, 0) for arguments, _ in requests]
        for ours, (_, theirs) in zip(getattr(model, kind)(instances), requests, strict=True):
            assert ours == (theirs if kind == "generate_until" else pytest.approx(theirs, abs=1e-3))


@NEEDS_HARNESS
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--tasks stories_choise", "there is no task 'stories_choise'.*fix: did you mean stories_choice?"),
        ("--tasks stories_far", "the task stories_far cannot be loaded: .*fix: its data are downloaded"),
    ],
)
def test_a_task_that_is_not_there_is_named(
    words: str,
    error: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write_tasks(tmp_path / "tasks")
    far = CHOICE.replace("stories_choice", "stories_far").replace("dataset_path: json", "dataset_path: some/where")
    (tmp_path / "tasks/far.yaml").write_text(re.sub("dataset_kwargs.*", "", far))
    capsys.readouterr()
    assert run_command(["evaluate", "run", *words.split(), "--include_path", "tasks"]) == 1
    said = capsys.readouterr().err
    assert re.search(error, said, re.S), said
    assert "Traceback" not in said and not (run / "evals").exists()


def test_without_the_harness_one_is_told_what_to_install(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    capsys.readouterr()
    assert run_command(["evaluate", "run", "--tasks", "hellaswag,builtin"]) == 1
    said = capsys.readouterr().err
    assert (
        said == "error: --tasks hellaswag needs a package that is not installed\n  fix: pip install 'drumline[eval]'\n"
    )
