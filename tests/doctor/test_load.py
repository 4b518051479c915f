"""A CPU that others use: the doctor and the first lines of a run say so."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drumline.cli.doctor import check_first
from drumline.config import RunConfig, TrainConfig
from drumline.doctor.load import check_load
from drumline.errors import ConfigError
from drumline.train.advice import advice


def test_a_load_above_the_cores_is_a_warning_with_what_helps() -> None:
    assert check_load(1.9, 2, {}).state == "ok"
    busy = check_load(5.25, 2, {})
    assert (busy.state, busy.what) == ("warning", "5.2 for 2 cores: others use them, so a CPU trains slowly")
    assert "OMP_WAIT_POLICY=passive" in busy.fix
    assert "OMP_WAIT_POLICY" not in check_load(5.25, 2, {"OMP_WAIT_POLICY": "PASSIVE"}).fix


def test_a_run_on_a_cpu_that_others_use_says_so_first(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "free") == 0
    assert "OMP_WAIT_POLICY" not in capsys.readouterr().out
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    assert train("--run_dir", "busy") == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("load   999.0 on "))
    assert "OMP_WAIT_POLICY=passive helps" in said
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert train("--run_dir", "passive") == 0
    said = capsys.readouterr().out
    assert "load   999.0 on " in said and "OMP_WAIT_POLICY" not in said


def test_ranks_that_share_cores_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    shared = "ranks  3 on 2 cores: they take turns, and --nproc 2 is likely faster"
    for ranks, device, said in (("3", "cpu", [shared]), ("3", "cuda", []), ("2", "cpu", [])):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        step: Any = SimpleNamespace(precision=SimpleNamespace(device=torch.device(device)))
        assert advice(TrainConfig(), step, total_steps=100) == said


def test_copies_of_snapshots_that_are_no_shards_are_said_to_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    step: Any = SimpleNamespace(precision=SimpleNamespace(device=torch.device("cuda")))
    (said,) = advice(TrainConfig(run=RunConfig(snapshot_copies=2)), step, total_steps=100)
    assert said.startswith("note: --snapshot_copies does nothing without --shard")


def test_far_more_ranks_than_cores_are_refused_before_they_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("drumline.doctor.machine.read_cores", lambda: 2)
    config = TrainConfig(run=RunConfig(device="cpu"))
    check_first(config, ranks=16)
    with pytest.raises(ConfigError, match="99 are too many for 2 cores: at most 16 can train on CPUs here") as refused:
        check_first(config, ranks=99)
    assert refused.value.fix == "use --nproc 2, or more hosts" and capsys.readouterr().err == ""
