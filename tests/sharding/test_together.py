"""What else a run does with its weights, sharded as well as not: samples and tasks."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.small import small
from helpers.stories import write_stories

import drumline.report.records
from drumline.cli.app import run_command
from drumline.report.records import read_metrics

DATA = "--train_data_path stories --valid_fraction 0.5 --context 64 --eval_every 3 --batch_size 2 --global_batch_size 6"
TIED = "--recipe classic"
UNTIED = "--preset modern-tiny --recipe modern --vocab_size 300"


def _train(argv: list[str]) -> int:
    drumline.report.records._SPARED_S = 0.0  # samples at every evaluation
    return run_command(argv)


def train(size: int, run: str, *flags: str) -> None:
    words = ["train", *small(*DATA.split(), *flags, "--run_dir", run)]
    for outcome in run_ranks(_train, [(words,)] * size):
        assert outcome.code == 0, outcome.err


def evaluations(run: str) -> list[dict[str, Any]]:
    records = [record for record in read_metrics(Path(run) / "metrics.jsonl") if "valid_loss" in record]
    return [{name: each[name] for name in each.keys() - {"eval_s", "time"}} for each in records]


@pytest.mark.parametrize("recipe", [TIED, UNTIED])
@pytest.mark.parametrize(("size", "shard"), [(2, "full"), (3, "full")])
def test_samples_and_tasks_of_a_sharded_run_are_those_of_a_plain_one(
    here: Path, recipe: str, size: int, shard: str
) -> None:
    write_stories(here / "stories")
    flags = [*recipe.split(), "--bitwise", "--eval_tasks", "builtin"]
    train(1, "plain", *flags)
    train(size, "sharded", *flags, "--shard", shard)
    for one, other in zip(evaluations("plain"), evaluations("sharded"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
        assert "next_word_accuracy" in one
    plain, sharded = (
        json.loads(Path(run, "samples.jsonl").read_text().splitlines()[0]) for run in ("plain", "sharded")
    )
    assert {**sharded, "time": plain["time"]} == plain and plain["step"] == 3 and plain["text"]
