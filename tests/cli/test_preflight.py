"""One process on a CPU starts without the doctor, unless there is something that he should see."""

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.cli.train import is_plain
from drumline.config import ModelSettings, RunConfig, TrainConfig
from drumline.optim import checkpoints_bytes


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def plain(run_dir: Path, environ: dict[str, str] | None = None, **run: Any) -> bool:
    return is_plain(TrainConfig(run=RunConfig(run_dir=str(run_dir), **run)), environ or {})


def test_a_run_on_a_machine_with_room_needs_no_doctor(tmp_path: Path) -> None:
    assert plain(tmp_path / "runs" / "new") and plain(tmp_path, {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize(
    "run", [{"device": "cuda"}, {"compile": True}, {"dtype": "bfloat16"}], ids=lambda run: next(iter(run))
)
def test_what_a_machine_may_not_have_is_for_the_doctor(tmp_path: Path, run: dict[str, Any]) -> None:
    assert not plain(tmp_path, **run)


@pytest.mark.parametrize(
    "environ",
    [
        {"OMP_NUM_THREADS": "many"},
        {"OMP_NUM_THREADS": "0"},
        {"MKL_NUM_THREADS": "100000"},
        {"RANK": "0"},
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"CUDA_VISIBLE_DEVICES": ""},
    ],
    ids=str,
)
def test_variables_that_may_hurt_are_for_the_doctor(tmp_path: Path, environ: dict[str, str]) -> None:
    assert not plain(tmp_path, environ)


def test_a_place_without_room_or_rights_is_for_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert not plain(tmp_path / "file" / "run")
    full = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: full)
        assert not plain(tmp_path)
    for preset in ("tiny", "gpt2", "modern", "modern-tiny"):  # what is thought to be enough is
        needed = checkpoints_bytes(TrainConfig(model=ModelSettings(preset=preset)))
        room = shutil.disk_usage(tmp_path)._replace(free=needed)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, room=room: room)
            assert not is_plain(TrainConfig(model=ModelSettings(preset=preset)), {})
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (512, 4096))
    assert not plain(tmp_path)
