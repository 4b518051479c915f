"""A batch that does not fit in memory: refused before the run with one that fits, and explained when memory ran out."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from helpers.small import small
from helpers.warm import run_warm

from drumline.bench.shortage import check_memory, explain_memory
from drumline.cli.app import run_command
from drumline.config import BatchConfig, ModelSettings, RanksConfig, RunConfig, TrainConfig, resolved
from drumline.errors import DrumlineError
from drumline.parallel import Place, World
from drumline.train.step import Backward
from drumline.units import counted

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
        *("--n_layers", "4", "--d_model", str(1 << 20), "--d_ff", str(1 << 22)),
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


GB = 10**9


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Check llama-8b on so many GPUs with so much free memory, on hosts of up to eight."""
    monkeypatch.setattr("drumline.bench.estimates.has_kernels", lambda device: False)

    def check(
        ranks: int, gb: int, *, host_gb: int = 1000, batch_size: int = 1, run: Any = None, shard: Any = "full"
    ) -> None:
        monkeypatch.setattr("drumline.bench.shortage.limit_bytes", lambda world: gb * GB)
        monkeypatch.setattr("drumline.bench.shortage.free_on_host", lambda world: (host_gb * GB, min(ranks, 8)))
        settings = RunConfig(dtype="bfloat16", **(run or {}))
        config = resolved(
            TrainConfig(model=ModelSettings(preset="llama-8b"), ranks=RanksConfig(shard=shard), run=settings)
        )
        batch = replace(config.batch, batch_size=batch_size, global_batch_size=batch_size * ranks)
        config = replace(config, data=replace(config.data, vocab_size=128256), batch=batch)
        check_memory(config, World(Place(size=ranks), torch.device("cuda")))

    return check


OFFLOAD: dict[str, Any] = {"activation_checkpointing": "block", "offload": "optimizer"}


def test_offloading_more_than_the_host_has_free_is_refused(
    on_gpus: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    on_gpus(1, 24, host_gb=140, run=OFFLOAD)
    assert not capsys.readouterr().err
    for ranks, gb, shard, fix in (
        (8, 20, "full", "use more hosts with --shard full, or choose a smaller model"),
        (8, 79, "full", "drop --offload: without it, the run fits on the GPU"),
        (16, 20, 8, "use --shard full, with which each rank keeps less"),
    ):
        with pytest.raises(DrumlineError, match=r"keeps about .* in the memory of a host, where .* are free") as error:
            on_gpus(ranks, gb, host_gb=80, run=OFFLOAD, shard=shard)
        assert error.value.fix.startswith(fix)
    on_gpus(8, 20, host_gb=110, run=OFFLOAD)
    problem, fix = capsys.readouterr().err.splitlines()
    assert problem.startswith("warning: --offload optimizer keeps about 1") and fix.startswith("  fix: use more hosts")


@pytest.mark.parametrize(
    ("gpus", "gb", "more", "fix"),
    [
        (8, 60, {"shard": "none"}, "add --shard full"),
        (8, 27, {}, "add --activation_checkpointing block"),
        (8, 27, {"shard": 2}, "add --shard full --activation_checkpointing block"),
        (1, 30, {"shard": "none"}, "add --shard full --offload optimizer"),
        (1, 15, {"shard": "none"}, "add --activation_checkpointing block --shard full --offload optimizer"),
        (1, 30, {"shard": "none", "host_gb": 100}, "start it on several GPUs with --shard full"),
        (8, 5, {"run": OFFLOAD}, "choose a smaller model"),
        (8, 5, {}, "add --activation_checkpointing block --offload optimizer, and choose a smaller model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_flags_that_make_room(
    on_gpus: Callable[..., None], gpus: int, gb: int, more: dict[str, Any], fix: str
) -> None:
    with pytest.raises(DrumlineError, match=r"GB for 1 sequence of 2,048 tokens at once") as error:
        on_gpus(gpus, gb, **more)
    assert error.value.fix.startswith(fix), error.value.fix


def test_flags_and_a_smaller_batch_are_named_together_where_only_both_make_room(on_gpus: Callable[..., None]) -> None:
    with pytest.raises(DrumlineError) as error:
        on_gpus(8, 32, batch_size=16)
    assert error.value.fix.startswith("add --activation_checkpointing block; --batch_size 1 --global_batch_size 128 ")


@pytest.mark.parametrize(
    ("ranks", "device", "batch_size", "fix"),
    [
        (1, "cpu", 1, "add --activation_checkpointing block, or choose a smaller model"),
        (2, "cpu", 1, "add --shard full --activation_checkpointing block, or choose a smaller model"),
        (2, "cpu", 2, "--batch_size 1 --global_batch_size 4 computes the same step in smaller parts; "),
        (4, "cuda", 1, "add --shard full --activation_checkpointing block --offload optimizer, or choose a smaller"),
    ],
)
def test_who_runs_out_of_memory_is_told_with_the_flags_that_help(
    monkeypatch: pytest.MonkeyPatch, ranks: int, device: str, batch_size: int, fix: str
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    batch = BatchConfig(batch_size=batch_size, global_batch_size=batch_size * ranks)
    config = TrainConfig(model=ModelSettings(preset="tiny"), batch=batch, run=RunConfig(dtype="bfloat16"))
    with pytest.raises(DrumlineError, match=f"with {counted(batch_size, 'sequence')} of ") as error:
        explain_memory(torch.OutOfMemoryError("20 GiB"), config, World(Place(size=ranks), torch.device(device)))
    assert error.value.fix.startswith(fix), error.value.fix
    if batch_size > 1:
        assert error.value.fix.endswith("; --shard full --activation_checkpointing block takes less memory too")


def test_flags_in_use_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(
        model=ModelSettings(preset="tiny"),
        batch=BatchConfig(batch_size=1, global_batch_size=2),
        ranks=RanksConfig(shard="full"),
        run=RunConfig(dtype="bfloat16", activation_checkpointing="block", offload="optimizer"),
    )
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    with pytest.raises(DrumlineError) as error:
        explain_memory(torch.OutOfMemoryError("20 GiB"), config, World(Place(size=2), torch.device("cuda")))
    assert error.value.fix.startswith("choose a smaller model")
