"""The tasks that need no download, and their results: after a run, or during it with --eval_tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from drumline.config import TrainConfig
from drumline.data import Data, TokenFile
from drumline.errors import ConfigError, DataError
from drumline.evals.items import Item, make_items
from drumline.evals.results import Result, fields_of
from drumline.evals.scoring import Score, Scorer, scorer_of
from drumline.evals.together import ShardedScorer
from drumline.generate import can_write
from drumline.parallel import Pulse, World, waiting_for
from drumline.report import Record
from drumline.sharding import is_sharded
from drumline.train import Setup

BUILTIN = "builtin"
Formats = dict[str, Callable[[Any], str]]


def items_for(tokens: TokenFile, scorer: Scorer, *, limit: int | None = None) -> list[Item]:
    """The items of all built-in tasks; refuses text that has none."""
    items = make_items(tokens, scorer, limit=limit)
    if not items:
        raise DataError(
            f"{tokens.path} has {len(tokens):,} tokens, too few to make tasks from",
            fix="hold out more text: --valid_fraction or --valid_data_path; or evaluate on other tokens: --data",
        )
    return items


def measured(
    scorer: Scorer, items: Sequence[Item], world: World, *, each_batch: Callable[[], None] = lambda: None
) -> list[Result]:
    """Results of the tasks; ranks share the items, and all get the same results."""
    own = range(world.rank, len(items), world.size)
    scores = iter(scorer.scores([pair for index in own for pair in items[index].pairs], each_batch=each_batch))
    dtype = torch.float64 if scorer.device.type != "mps" else torch.float32
    values = torch.zeros(len(items), 2, dtype=dtype)
    for index in own:
        item = items[index]
        values[index] = torch.tensor(_judged(item, [next(scores) for _ in item.pairs]), dtype=dtype)
    with waiting_for("the results of the tasks"):
        # Each value is one rank's, and zero on the others: the sums are exact, in whatever order.
        rows: list[list[float]] = world.sum(values.to(scorer.device)).tolist()
    tasks = dict.fromkeys(item.task for item in items)
    return [_result(task, [row for item, row in zip(items, rows, strict=True) if item.task == task]) for task in tasks]


def _judged(item: Item, scores: Sequence[Score]) -> tuple[float, float]:
    """What counts of an item: two numbers, of which a task may need one."""
    first = scores[0]
    if item.task == "next_word":
        return float(first.is_greedy), 0.0
    if item.task == "documents":
        return -first.nats / math.log(2) / max(1, item.text_bytes), 0.0
    return _right([each.nats for each in scores]), _right([each.nats / max(1, each.tokens) for each in scores])


def _right(values: Sequence[float]) -> float:
    """1 if the first is the highest; among n equals 1/n, so that a model without an opinion is as good as chance."""
    return (values[0] == max(values)) / values.count(values[0])


def _result(task: str, rows: Sequence[Sequence[float]]) -> Result:
    first, second = zip(*rows, strict=True)
    if task == "documents":
        spread = {"bits_per_byte_std": statistics.stdev(first) if len(first) > 1 else 0.0}
        return Result(task, len(rows), {**_mean("bits_per_byte", first), **spread})
    metrics = _mean("accuracy", first)
    return Result(task, len(rows), metrics if task == "next_word" else metrics | _mean("accuracy_per_token", second))


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return {name: statistics.fmean(values), f"{name}_stderr": error}


def data_for_tasks(config: TrainConfig, data: Data, world: World) -> TokenFile:
    """The validation data of a run with --eval_tasks; refuses what tasks cannot be made from."""
    tasks = config.run.eval_tasks

    def checked() -> None:
        if tasks != BUILTIN:
            raise ConfigError(
                f"eval_tasks {tasks!r} is not possible during training, only {BUILTIN}",
                fix=f"give --eval_tasks {BUILTIN}; for other tasks: drumline evaluate RUN --tasks {tasks}",
            )
        if data.valid is None or data.tokenizer is None:
            missing = "validation data" if data.valid is None else "tokenizer"
            raise ConfigError(
                f"eval_tasks {tasks} needs held-out text, and {config.data.train_data_path} has no {missing}",
                fix="add --valid_data_path" if data.valid is None else "add --tokenizer, or train on text",
            )

    world.on_all_ranks(checked)
    assert data.valid is not None
    return data.valid


def with_task_formats(formats: Formats) -> Formats:
    """What the console shows of a record, and of the results of the tasks in it."""
    shown = {"next_word_accuracy": "next word", "multiple_choice_accuracy": "multiple choice"}
    return formats | {key: partial("{0} {1:.1%}".format, name) for key, name in shown.items()}


def with_tasks(
    evaluate: Callable[[Pulse], Record], config: TrainConfig, data: Data, setup: Setup
) -> Callable[[Pulse], Record]:
    """An evaluation that adds the results of the built-in tasks to its record."""
    model, world = setup.step.model, setup.world
    assert data.tokenizer is not None and data.valid is not None
    if not can_write(model, by_all=True):
        raise ConfigError(
            f"eval_tasks needs logits, and {type(model).__name__} returns none without targets",
            fix="let its forward take targets=None and return (logits, loss), or drop --eval_tasks",
        )
    scorer = scorer_of(model, data.tokenizer, config, batch_size=config.batch.batch_size or 1)
    if is_sharded(model):
        scorer = ShardedScorer(**vars(scorer), world=world, precision=setup.step.precision)
    valid = data.valid
    items = world.on_all_ranks(lambda: items_for(valid, scorer))

    def run(pulse: Pulse) -> Record:
        return evaluate(pulse) | fields_of(measured(scorer, items, world, each_batch=pulse.still_there))

    return run
