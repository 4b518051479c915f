"""A batch that does not fit in memory: refused before the run with one that fits, and explained when memory ran out."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from helpers.small import small
from helpers.warm import run_warm

from drumline.bench.shortage import check_memory
from drumline.cli.app import run_command
from drumline.config import ModelSettings, RanksConfig, TrainConfig, resolved
from drumline.errors import DrumlineError
from drumline.parallel import Place, World
from drumline.train.step import Backward

Train = Callable[..., int]
LIMITED = """
import psutil, resource, sys
from drumline.cli.app import main
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (300 << 20), resource.RLIM_INFINITY))
main(sys.argv[1:])
"""


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")], ids=["alone", "two ranks"])
def test_a_batch_far_beyond_the_free_memory_is_refused_at_once_with_one_that_fits(
    here: Path, ranks: tuple[str, ...]
) -> None:
    flags = small("--batch_size", "1000000000", "--train_data_path", "text", "--run_dir", "run", *ranks)
    done = run_warm([sys.executable, "-m", "drumline", "train", *flags], cwd=here, timeout=120)
    problem, fix = done.stderr.splitlines()
    assert done.returncode == 1 and not (here / "run").exists()
    needed, free = (float(each.replace(",", "")) for each in re.findall(r"([\d,.]+) GB", problem))
    assert needed > 1.3 * free and "1,000,000,000 sequences of 16 tokens at once" in problem
    fitting = re.search(r"--batch_size (\d+) --global_batch_size (\d+)", fix)
    assert fitting and 1 < int(fitting[1]) < 1_000_000_000 and int(fitting[2]) == 1_000_000_000 * (2 if ranks else 1)


def test_a_model_that_does_not_fit_at_all_is_refused_with_what_to_make_smaller(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = (
        "--doctor",
        "off",
        "--n_layers",
        "1000",
        "--d_model",
        "65536",
        "--d_ff",
        "262144",
        "--train_data_path",
        "text",
    )
    assert run_command(["train", *small(*huge)]) == 1
    problem, fix = capsys.readouterr().err.splitlines()
    assert "GB of memory are free" in problem and "smaller model" in fix


def test_memory_that_runs_out_while_training_ends_with_what_to_change(here: Path) -> None:
    # The model and its batch take some 500 MB, which this process may not have beside what is loaded.
    words = small("--batch_size", "200000", "--train_data_path", "text", "--run_dir", "run")
    done = run_warm([sys.executable, "-c", LIMITED, "train", *words], cwd=here, timeout=120)
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    assert lines[0] == "error: out of memory on the CPU with 200,000 sequences of 16 tokens at once"
    assert "allocate" in lines[1] and lines[2].startswith("  fix: --batch_size 100000 --global_batch_size 200000 ")
    assert len(lines) == 3


def test_a_gpu_without_memory_is_told_with_half_the_batch(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(Backward, "__call__", fails)
    assert train("--batch_size", "8", "--run_dir", "run") == 1
    lines = capsys.readouterr().err.splitlines()
    assert "with 8 sequences of 16 tokens at once" in lines[0] and "Tried to allocate" in lines[1]
    assert "--batch_size 4 --global_batch_size 8" in lines[2]


def test_any_other_error_is_not_taken_for_it(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Backward, "__call__", fails)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train("--run_dir", "run")


def test_a_sharded_run_is_judged_by_the_part_that_a_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(shard: Literal["none", "full"]) -> None:
        config = resolved(
            TrainConfig(model=ModelSettings(preset="llama-1b", context=64), ranks=RanksConfig(shard=shard))
        )
        config = replace(
            config,
            data=replace(config.data, vocab_size=512),
            batch=replace(config.batch, batch_size=1, global_batch_size=8),
        )
        check_memory(config, World(Place(size=8), torch.device("cpu")))

    monkeypatch.setattr("drumline.bench.shortage.limit_bytes", lambda world: 9_000_000_000)
    check("full")
    with pytest.raises(DrumlineError, match="a step needs about"):
        check("none")
