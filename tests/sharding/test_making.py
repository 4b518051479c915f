"""No rank ever holds the whole model: it is drawn, or restored, row by row."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import run_ranks
from helpers.small import small
from torch import nn

from drumline.cli.app import run_command
from drumline.errors import ConfigError
from drumline.parallel.world import Place, World
from drumline.sharding import mesh
from drumline.sharding.making import undrawn
from drumline.train.history import History

RANKS, WIDTH, LAYERS = 4, 576, 8
PARAMETERS = 12 * LAYERS * WIDTH**2  # and less than 2% more
LARGE = {"--n_layers": LAYERS, "--n_heads": 8, "--d_model": WIDTH, "--d_ff": 4 * WIDTH}
LOADED = ("drumline.sharding.step", "drumline.checkpoint.restoring", "torch.distributed.tensor")
"""Programs are no weights."""
FLAGS = small(
    *[str(word) for pair in LARGE.items() for word in pair],
    *"--recipe classic --train_data_path tokens.bin --run_dir run --shard full".split(),
    *"--batch_size 1 --global_batch_size 4".split(),
)


def resident(kind: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{kind}:")]
    return int(line.split()[1]) * 1024


def _grown(argv: list[str]) -> dict[str, Any]:
    """By how many bytes a rank had grown at most when its weights were there, and until its end."""
    for name in LOADED:
        importlib.import_module(name)
    mesh._MAPPED_BYTES = 1 << 20  # the tensors of this model are smaller than those of a large one
    begin, grown = History.begin, dict[str, Any]()
    Path("/proc/self/clear_refs").write_text("5")  # forget what was resident at most before
    before = resident("VmRSS")

    def begun(history: History) -> int:
        step = begin(history)
        grown["begun"] = resident("VmHWM") - before
        return step

    History.begin = begun  # type: ignore[method-assign]
    grown["code"] = run_command(argv)
    grown["ended"] = resident("VmHWM") - before
    return grown


def grown(*flags: str) -> list[dict[str, Any]]:
    outcomes = run_ranks(_grown, [(["train", *FLAGS, *flags],)] * RANKS)
    assert [each.value and each.value["code"] for each in outcomes] == [0] * RANKS, outcomes[0].err
    return [each.value for each in outcomes]


@pytest.mark.long
def test_no_rank_ever_has_the_memory_of_the_whole_model_or_state(here: Path) -> None:
    # Tokens without a tokenizer: a sample at the end would take longer than all else.
    np.random.default_rng(0).integers(300, size=4096, dtype=np.uint16).tofile("tokens.bin")
    weights, saved, state = (each * PARAMETERS for each in (4, 12, 16))
    new = grown("--total_steps", "1")
    resumed = grown("--total_steps", "2", "--allow_change", "total_steps")
    for each in (*new, *resumed):
        assert each["begun"] < (weights if each in new else saved) and each["ended"] < state, (new, resumed)


def test_a_tensor_without_an_initial_value_is_refused() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.forgotten = nn.Parameter(torch.empty(3))

    with pytest.raises(ConfigError, match="forgotten has no initial value"):
        undrawn(Forgotten, World(Place(), torch.device("cpu")))
