"""Tasks from the held-out text of a run: anyone gets a number, and the same one everywhere."""

import errno
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.ranks import train_ranks
from helpers.small import small
from helpers.stories import write_stories
from torch import nn

from drumline.cli.app import run_command
from drumline.data.opening import open_tokens
from drumline.data.tokenizer import Tokenizer
from drumline.data.tokens import TokenFile
from drumline.errors import ConfigError
from drumline.evals.builtin import measured
from drumline.evals.items import make_items
from drumline.evals.results import Result, store
from drumline.evals.scoring import Scorer
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import Place, World
from drumline.report.records import read_metrics

STORIES = "--train_data_path stories --valid_fraction 0.5 --context 64 --eval_every 3".split()
ALONE = World(Place(), torch.device("cpu"))


@pytest.fixture
def run(tmp_path: Path, train: Callable[..., int]) -> Path:
    write_stories(tmp_path / "stories")
    assert train(*STORIES, "--run_dir", "run", "--tensorboard") == 0
    return tmp_path / "run"


def test_a_run_gets_numbers_without_a_download(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_command(["evaluate", "run", "--tasks", "builtin"]) == 0
    printed = capsys.readouterr().out
    content = json.loads((run / "evals/step-00000006.json").read_text())
    tasks = content["tasks"]
    assert content["step"] == 6 and list(tasks) == ["next_word", "multiple_choice", "documents"]
    assert (
        tasks["next_word"]["items"] > 50 and tasks["multiple_choice"]["items"] > 50 and tasks["documents"]["items"] > 9
    )
    accuracy, items = tasks["next_word"]["metrics"]["accuracy"], tasks["next_word"]["items"]
    error = math.sqrt(accuracy * (1 - accuracy) / (items - 1))
    assert tasks["next_word"]["metrics"]["accuracy_stderr"] == pytest.approx(error)
    assert f"{tasks['documents']['metrics']['bits_per_byte']:.4f}" in printed and "evals/step-00000006.json" in printed
    assert len(list((run / "tensorboard").glob("events*"))) == 2  # of the run, and of this
    assert sorted(path.name for path in (run / "evals").iterdir()) == ["step-00000006.json"]

    (run / "evals/step-00000006.json").write_text(json.dumps({"tasks": {"mine": {"items": 1}}}))
    assert run_command(["evaluate", "run/checkpoints/step-00000006", "--tasks", "builtin", "--batch_size", "3"]) == 0
    again = json.loads((run / "evals/step-00000006.json").read_text())["tasks"]
    assert again.pop("mine") == {"items": 1}  # what is there of other tasks stays
    for task, result in tasks.items():
        assert again[task]["metrics"] == pytest.approx(result["metrics"], abs=1e-4)


class Knowing(nn.Module):
    """Knows a text by heart: of each position, the next token, if the nine tokens before it are in the text."""

    def __init__(self, ids: list[int], vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.follows = {tuple(ids[at - 9 : at]): ids[at] for at in range(9, len(ids))}
        self.vocab_size = vocab_size

    def forward(self, input_ids: torch.Tensor, *, targets: None = None) -> tuple[torch.Tensor, None]:
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        for row, ids in enumerate(input_ids.tolist()):
            for at in range(8, len(ids)):
                logits[row, at, self.follows.get(tuple(ids[at - 8 : at + 1]), 0)] = 20.0
        return logits, None


def test_a_model_that_knows_the_text_is_always_right_and_one_that_knows_nothing_seldom(run: Path) -> None:
    (prepared,) = Path("data").iterdir()
    valid = open_tokens(prepared, split="valid")
    tokenizer = Tokenizer.load(run / "tokenizer.json")

    def results(model: nn.Module) -> dict[str, float]:
        scorer = Scorer(model=model, tokenizer=tokenizer, context=64, batch_size=8)
        items = make_items(valid, scorer, limit=20)
        return {
            f"{result.task} {name}": value
            for result in measured(scorer, items, ALONE)
            for name, value in result.metrics.items()
        }

    ids = valid.read(0, len(valid)).tolist()
    knowing, ignorant = results(Knowing(ids, 300)), results(Knowing([], 300))
    assert knowing["next_word accuracy"] == knowing["multiple_choice accuracy"] == 1.0
    assert knowing["multiple_choice accuracy_per_token"] == 1.0
    assert ignorant["next_word accuracy"] == 0.0 and ignorant["multiple_choice accuracy_per_token"] == 0.25
    assert knowing["documents bits_per_byte"] < ignorant["documents bits_per_byte"]


def test_items_are_the_same_for_every_model_and_without_the_places_of_documents(run: Path) -> None:
    (prepared,) = Path("data").iterdir()
    valid = open_tokens(prepared, split="valid")
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    scorers = [Scorer(model=Knowing([], 300), tokenizer=tokenizer, context=64, batch_size=size) for size in (1, 5)]
    items = make_items(valid, scorers[0], limit=None)
    assert items == make_items(valid, scorers[1], limit=None)
    assert items == make_items(TokenFile(path=valid.path, tokens=np.array(valid.tokens)), scorers[0], limit=None)
    few = make_items(valid, scorers[0], limit=3)
    assert len(few) == 9 and all(item in items for item in few if item.task != "multiple_choice")
    for item in items:
        if item.task == "multiple_choice":
            texts = [tokenizer.decode(after) for _, after in item.pairs]
            assert len(set(texts)) == 4


def test_tasks_during_training_are_in_the_metrics_and_do_not_depend_on_the_number_of_ranks(here: Path) -> None:
    write_stories(here / "stories")
    words = [*STORIES, "--global_batch_size", "8", "--bitwise", "--eval_tasks", "builtin"]
    evaluations = []
    for size in (1, 3):
        flags = small(*words, "--batch_size", "2", "--run_dir", f"w{size}", "--total_steps", "3")
        for outcome in train_ranks(size, *flags):
            assert outcome.code == 0, outcome.err
        evaluations += [each for each in read_metrics(here / f"w{size}/metrics.jsonl") if "valid_loss" in each]
    one, three = [{name: each[name] for name in each.keys() - {"eval_s", "time"}} for each in evaluations]
    assert one == pytest.approx(three, rel=1e-6)
    assert {"next_word_accuracy", "multiple_choice_accuracy", "documents_bits_per_byte"} < one.keys()
    assert run_command(["evaluate", "w1", "--tasks", "builtin"]) == 0
    tasks = json.loads((here / "w1/evals/step-00000003.json").read_text())["tasks"]
    for task, metric in (("next_word", "accuracy"), ("documents", "bits_per_byte")):
        assert tasks[task]["metrics"][metric] == pytest.approx(one[f"{task}_{metric}"], abs=1e-6)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--tasks ,", "names no task.*fix: give --tasks builtin"),
        ("--tasks builtin --limit 0", "limit 0 leaves no items"),
        ("--limit 3", "--limit 3 is for tasks.*fix: add --tasks"),
    ],
)
def test_a_command_that_measures_nothing_is_refused(
    words: str, error: str, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "run", "--total_steps", "1") == 0
    refused(["evaluate", "run", *words.split()], error, capsys)


def refused(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run_command(words) == 1
    said = capsys.readouterr().err
    assert re.search(error, said, re.S), said
    assert len([line for line in said.splitlines() if line.startswith(("error:", "  fix:"))]) == 2


def test_a_run_without_held_out_text_or_tokenizer_is_told_what_is_missing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.random.default_rng(0).integers(300, size=4000).astype(np.uint16).tofile("own.bin")
    flags = small("--train_data_path", "own.bin", "--total_steps", "1")
    assert run_command(["train", *flags, "--run_dir", "bare"]) == 0
    refused(["evaluate", "bare", "--tasks", "builtin"], "no tokenizer.json", capsys)
    refused(["train", *flags, "--run_dir", "new", "--eval_tasks", "builtin"], "own.bin has no validation data", capsys)
    refused(["train", *small("--train_data_path", "text", "--eval_tasks", "hellaswag")], "only builtin", capsys)


def test_what_is_not_a_number_leaves_the_file_valid_json_and_a_full_disk_keeps_the_numbers_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    path = store([Result("next_word", 3, {"accuracy": math.nan})], folder, 7)
    assert path is not None
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["tasks"]["next_word"]["metrics"] == {
        "accuracy": None
    }

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("drumline.evals.results.replace_text", full)
    with pytest.raises(ConfigError, match="No space left") as refused:
        store([Result("next_word", 3, {"accuracy": 0.25})], folder, 7)
    assert refused.value.details == ("next_word accuracy 0.2500  3",)
