"""What only several ranks do: prepare the data in turn, check that they train the same run, and compare themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from drumline.checkpoint import weights_sha256
from drumline.config import TrainConfig
from drumline.data import Data, ProgressCallback, open_data
from drumline.files import RunFolder
from drumline.parallel import Pace, Pulse, World, compare, settings, versions, waiting_for
from drumline.train.history import History
from drumline.train.setup import Setup
from drumline.train.trouble import compare_replicas

Tell = Callable[[str, dict[str, Any]], None]


def open_in_turn(config: TrainConfig, folder: RunFolder, world: World, progress: ProgressCallback | None) -> Data:
    """Rank 0 tokenizes the text, then one rank of each other host, which may have its own disk; then all read it."""
    own = world.place.local_rank == 0
    open_own = partial(open_data, config, run=folder)
    first = world.on_all_ranks(lambda: open_own(progress=progress) if world.is_rank0 else None)
    second = world.on_all_ranks(lambda: open_own() if own and not world.is_rank0 else None)
    return world.on_all_ranks(lambda: first or second or open_own())


def agree(world: World, config: TrainConfig, data: Data, model: nn.Module | None, *, facts: dict[str, Any]) -> None:
    """Refuse to train if versions, settings, data or initial weights (if given) differ between ranks."""
    origins = {
        "tokenizer": data.tokenizer.sha256 if data.tokenizer else None,
        "valid_data": data.valid and (data.valid.sha256 or len(data.valid)),
        "samples of the data": {split: sample["crc32"] for split, sample in data.samples.items()},
        "initial weights": model and weights_sha256(model),
    }
    compare(world, {**versions(), **settings(config), **facts, **origins})


def measured_pace(setup: Setup, pulse: Pulse, tell: Tell) -> Pace:
    """Compares the ranks' times."""
    return Pace(setup.world, setup.batches.plan, pulse, tell=tell)


def comparison(setup: Setup, history: History, tell: Tell) -> Callable[[int], None]:
    """Raises if the ranks' weights differ."""

    def compare_weights(step: int) -> None:
        # Each rank has its own statistics until the next forward, when DDP broadcasts rank 0's; so do we.
        with waiting_for("rank 0's buffers"):
            setup.world.broadcast([setup.step.model.get_buffer(name) for name in history.statistics])
        compare_replicas(setup.step.model, setup.world, step, tell=tell)

    return compare_weights
