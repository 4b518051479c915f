"""Estimates of memory: what backward is really given, and what was measured on a GPU."""

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drumline.bench.estimates import Memory, estimate
from drumline.cli.app import run_command
from drumline.config import ModelSettings, OptimConfig, RanksConfig, RunConfig, TrainConfig, resolved
from drumline.model import build_model

GIB, GB = 1 << 30, 10**9
VOCABULARY = 50304


def config_of(
    preset: str, *, run: RunConfig | None = None, ranks: RanksConfig | None = None, **model: Any
) -> TrainConfig:
    optim = OptimConfig(optimizer="adamw", lr=1e-4, embedding_lr=1e-4, head_lr=1e-4)
    settings = ModelSettings(preset=preset, **model)
    return resolved(TrainConfig(model=settings, optim=optim, run=run or RunConfig(), ranks=ranks or RanksConfig()))


def kept_for_backward(config: TrainConfig, sequences: int) -> int:
    """Bytes that a forward of the real model keeps for backward, without its weights."""
    model, found = build_model(config, vocab_size=64), {}
    own = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict(keep_vars=True).values()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so that its place is not taken by another
        return tensor

    tokens = torch.randint(64, (sequences, config.model.context or 0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, targets=tokens)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize(
    "preset", [("gpt2", {}), ("modern", {"value_tables": 0}), ("llama-1b", {"n_kv_heads": 2})], ids=lambda each: each[0]
)
def test_activations_are_estimated_as_what_backward_is_given(preset: tuple[str, dict[str, Any]]) -> None:
    def of_layers(layers: int) -> tuple[int, int]:
        name, options = preset
        config = config_of(name, n_layers=layers, d_model=128, n_heads=4, d_ff=512, context=96, **options)
        memory = estimate(config, tokens=3 * 96, vocab_size=64, device=torch.device("cpu"), dtype=torch.float32)
        return kept_for_backward(config, sequences=3), memory.step_bytes

    few, many = of_layers(8), of_layers(12)
    assert many[1] - few[1] == pytest.approx(many[0] - few[0], rel=0.1)


@pytest.mark.parametrize(
    ("preset", "settings", "sequences", "measured"),
    [
        ("gpt2", {"run": RunConfig(compile=True)}, 32, 11.9 * GIB),
        ("modern", {"recipe": "classic"}, 32, 10.3 * GIB),
        ("modern-medium", {"recipe": "classic"}, 16, 15.5 * GIB),
        ("modern-xl", {"recipe": "classic"}, 16, 50.7 * GIB),
        ("gpt2-xl", {}, 8, 46.1 * GB),
        ("gpt2-xl", {"ranks": RanksConfig(shard="full")}, 8, 43.4 * GB),
        ("llama-3b", {}, 4, 70.8 * GB),
        ("llama-3b", {"ranks": RanksConfig(shard="full")}, 4, 65.7 * GB),
        ("gpt2-xl", {"run": RunConfig(compile=True)}, 8, 43.9 * GB),
        ("gpt2-xl", {}, 16, 68.8 * GB),
        ("gpt2-xl", {"ranks": RanksConfig(shard="full")}, 16, 66.1 * GB),
        ("gpt2-xl", {"run": RunConfig(compile=True)}, 32, 104.3 * GB),
        ("gpt2-xl", {"run": RunConfig(compile=True), "ranks": RanksConfig(shard="full")}, 32, 101.6 * GB),
        ("llama-3b", {"run": RunConfig(compile=True), "ranks": RanksConfig(shard="full")}, 8, 86.1 * GB),
    ],
)
def test_the_estimate_is_within_a_tenth_of_what_was_measured_on_an_h200(
    preset: str, settings: dict[str, Any], sequences: int, measured: float
) -> None:
    assert estimated_on_an_h200(preset, settings, sequences) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("how", "sequences", "rounds", "measured"),
    [
        ("block", 1, 8, 121.0 * GB),
        ("selective", 2, 4, 132.9 * GB),
        ("selective", 3, 16, 139.1 * GB),
        ("selective", 4, 8, 145.4 * GB),
    ],
)
def test_so_it_is_of_a_model_that_fills_the_gpu(how: Any, sequences: int, rounds: int, measured: float) -> None:
    run = RunConfig(compile=True, activation_checkpointing=how)
    settings = {"run": run, "ranks": RanksConfig(shard="full")}
    estimated = estimated_on_an_h200("llama-8b", settings, sequences, rounds=rounds)
    assert estimated == pytest.approx(measured, rel=0.1)


def estimated_on_an_h200(preset: str, settings: dict[str, Any], sequences: int, *, rounds: int = 1) -> int:
    """The figures of benchmarks/README.md (gpu_throughput.py, sharding.py)."""
    config = config_of(preset, **settings)
    memory = estimate(
        config,
        tokens=sequences * (config.model.context or 0),
        vocab_size=VOCABULARY,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        rounds=rounds,
        kernels=True,
    )
    return memory.peak_bytes


def test_muon_keeps_one_number_for_each_weight_of_a_matrix_and_adamw_two() -> None:
    def estimated(**settings: Any) -> Memory:
        config = config_of("modern")
        config = replace(config, optim=replace(config.optim, **settings))
        return estimate(config, tokens=1024, vocab_size=VOCABULARY, device=torch.device("cpu"), dtype=torch.float32)

    muon, adamw = estimated(optimizer="muon"), estimated()
    assert adamw.state_bytes == 12 * adamw.parameters
    assert muon.state_bytes == adamw.state_bytes - 4 * 12 * 12 * 768**2


def test_gradients_are_there_beside_activations_only_where_they_stay_from_one_micro_batch_to_the_next() -> None:
    def step_bytes(**more: Any) -> int:
        config = config_of("modern")
        cpu = torch.device("cpu")
        return estimate(config, tokens=4096, vocab_size=512, device=cpu, dtype=torch.float32, **more).step_bytes

    gradients = (
        4
        * estimate(
            config_of("modern"), tokens=1, vocab_size=512, device=torch.device("cpu"), dtype=torch.float32
        ).parameters
    )
    assert step_bytes(rounds=2) == step_bytes(ranks=2) == step_bytes() + gradients


def test_a_sharded_rank_needs_its_part_of_the_state_and_less_with_offloading() -> None:
    def state_bytes(shard: Any = "none", offload: Any = "none") -> int:
        config = config_of("llama-3b", ranks=RanksConfig(shard=shard), run=RunConfig(offload=offload))
        gpu, dtype = torch.device("cuda"), torch.bfloat16
        return estimate(
            config, tokens=2048, vocab_size=128256, device=gpu, dtype=dtype, ranks=8, kernels=False
        ).state_bytes

    whole, pairs, full = state_bytes(), state_bytes(2), state_bytes("full")
    gathered = pairs - whole // 2
    assert 0 < gathered < 0.25 * whole
    assert full == pytest.approx(whole / 8 + gathered, rel=1e-6)
    assert state_bytes("full", "optimizer") == pytest.approx(gathered, rel=1e-6)


def offloaded(device: str, ranks: int = 1, offload: Any = "optimizer") -> Memory:
    config = config_of("llama-8b", ranks=RanksConfig(shard="full"), run=RunConfig(offload=offload))
    where, dtype = torch.device(device), torch.bfloat16
    return estimate(config, tokens=2048, vocab_size=128256, device=where, dtype=dtype, ranks=ranks, kernels=False)


def test_what_is_offloaded_is_in_the_memory_of_the_host_which_on_a_cpu_is_the_same() -> None:
    assert offloaded("cpu") == offloaded("cpu", offload="none")
    assert round(offloaded("cuda").host_bytes / 1e9) == 128
    assert offloaded("cuda").host_bytes == 16 * offloaded("cuda").parameters == 8 * offloaded("cuda", 8).host_bytes
    assert offloaded("cuda", offload="none").host_bytes == 0


def test_a_dry_run_says_what_offloading_takes_of_a_host(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*more: str) -> list[str]:
        words = "--train_data_path text --dtype bfloat16 --preset llama-8b --vocab_size 128256 --total_steps 1"
        assert run_command(["train", "--dry_run", *words.split(), "--nproc", "4", *more]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("host memory")]

    monkeypatch.setattr("drumline.bench.dry_run.pick_device", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr("drumline.bench.estimates.has_kernels", lambda device: False)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (80 * GB, 80 * GB))
    monkeypatch.setattr("drumline.bench.dry_run.free_on_host", lambda world: (200 * GB, 1))
    assert lines("--shard", "full") == []
    said = "host memory      about 128.48 GB for weights, gradients and optimizer of 4 ranks on each host, "
    assert lines("--shard", "full", "--offload", "optimizer") == [said + "where 200.00 GB are free"]
    (two,) = lines("--shard", "full", "--offload", "optimizer", "--nnodes", "2", "--rdzv_endpoint", "h:1")
    assert two.startswith("host memory      about 64.24 GB")


def test_what_is_published_to_fit_is_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    source = importlib.util.spec_from_file_location("what_fits", root / "benchmarks/what_fits.py")
    assert source and source.loader
    what_fits = importlib.util.module_from_spec(source)
    source.loader.exec_module(what_fits)
    what_fits.main([])
    _, _, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 4 and set(rows) <= set((root / "docs/distributed.md").read_text(encoding="utf-8").splitlines())
    args = argparse.Namespace(context=2048, batch_size=1)
    assert what_fits.predicted("llama-3b", 4, "none", "none", args).peak_bytes < 24 * GIB
    assert what_fits.predicted("llama-1b", 2, "none", "none", args).peak_bytes < 24 * GIB
    assert what_fits.predicted("llama-8b", 8, "none", "none", args).peak_bytes < 40 * GB
