"""Compiled, a sharded run is the same: hooks that gather weights stay outside of one graph that serves all blocks."""

import logging
from functools import partial
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks, train_ranks
from helpers.small import small

from drumline.cli.app import run_command
from drumline.pieces import stored_shapes
from drumline.report.records import read_metrics

DATA = "--train_data_path text --batch_size 2 --global_batch_size 4 --n_layers 6 --eval_every 2 --total_steps 3".split()
TIED = "--recipe classic"
UNTIED = "--preset llama-1b --d_model 32 --n_heads 4 --n_kv_heads 2 --d_ff 64"
MOST = 4
"""Graphs of a run: of a block and of the last norm, in training and in evaluation."""


def _compiled(argv: list[str]) -> dict[str, Any]:
    # All of torch.compile but its last stage, in which g++ takes long.
    torch.compile = partial(torch.compile, backend="aot_eager")
    warned = QueueHandler(SimpleQueue())
    logging.getLogger("torch._higher_order_ops.wrap").addHandler(warned)
    code, counters = run_command(argv), torch._dynamo.utils.counters
    quiet, breaks = warned.queue.empty(), [*counters["graph_break"]]
    return {"code": code, "graphs": counters["stats"]["unique_graphs"], "breaks": breaks, "quiet": quiet}


def losses(run: str) -> list[float]:
    records = list(read_metrics(Path(run) / "metrics.jsonl"))
    return [each[key] for each in records for key in ("loss", "grad_norm", "valid_loss") if key in each]


@pytest.mark.needs("compiler")
@pytest.mark.parametrize(("model", "how"), [(UNTIED, "none"), (TIED, "block"), (UNTIED, "selective")])
def test_one_compilation_serves_all_blocks_of_a_sharded_run_and_gives_the_same_curve(
    here: Path, model: str, how: str
) -> None:
    flags = small(*DATA, *model.split(), "--activation_checkpointing", how)
    (plain,) = train_ranks(1, *flags, "--run_dir", "plain")
    assert plain.code == 0, plain.err
    ended = run_ranks(_compiled, [(["train", *flags, "--run_dir", "compiled", "--shard", "full", "--compile"],)] * 2)
    for each in ended:
        assert each.value and each.value["code"] == 0, each.err
        assert 0 < each.value["graphs"] <= MOST and not each.value["breaks"] and each.value["quiet"], each.value
    assert losses("compiled") == pytest.approx(losses("plain"), rel=1e-4)
    saved = [stored_shapes(Path(run, "checkpoints/step-00000003")).keys() for run in ("plain", "compiled")]
    assert saved[0] == saved[1]
