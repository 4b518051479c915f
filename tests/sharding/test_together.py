"""What else a run does with its weights, sharded as well as not: samples and tasks."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.small import small
from helpers.stories import write_stories

import drumline.report.records
from drumline.cli.app import run_command
from drumline.config import TrainConfig
from drumline.errors import EXIT_STOPPED
from drumline.generate import SampleConfig, together
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
        [json.loads(line) for line in Path(run, "samples.jsonl").read_text().splitlines()]
        for run in ("plain", "sharded")
    )
    for one, other, step in ((plain[0], sharded[0], 3), (plain[-1], sharded[-1], 6)):
        assert {**other, "time": one["time"]} == one and one["step"] == step and one["text"]
    assert len(plain[-1]["text"]) > len(plain[0]["text"])


def _asked_to_stop(argv: list[str]) -> int:
    """The last rank is asked when all of them are about to write the last sample."""
    settings_for = together.settings_for

    def asked(config: TrainConfig, *, is_last: bool = False) -> SampleConfig:
        if is_last and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        return settings_for(config, is_last=is_last)

    together.settings_for = asked
    return run_command(argv)


def test_the_last_sample_of_a_sharded_run_ends_on_all_ranks_if_one_is_asked_to_stop(here: Path) -> None:
    write_stories(here / "stories")
    words = ["train", *small(*DATA.split(), *TIED.split(), "--shard", "full", "--run_dir", "run")]
    ended = run_ranks(_asked_to_stop, [(words,)] * 2)
    assert [each.code for each in ended] == [EXIT_STOPPED] * 2, ended
    assert "stopped after the last step" in ended[0].out and not ended[1].out
    (again,) = run_ranks(run_command, [(["train", "--run_dir", "run"],)])
    assert again.code == 0 and "\nsample:\n" in again.out, again
