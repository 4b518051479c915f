"""Checkpoints: complete or absent, verified, and nothing lost between saving and loading."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from drumline import checkpoints
from drumline.errors import CheckpointError
from drumline.run_folder import RunFolder


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def trained(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: object
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = kind(model.parameters(), lr=0.1, **settings)  # type: ignore[call-arg]
    for _ in range(3):
        model.head(model.norm(model.embedding(torch.randint(7, (5,))))).square().mean().backward()
        optimizer.step()
    return model, optimizer


def save(folder: RunFolder, step: int) -> Path:
    model, optimizer = trained()
    return checkpoints.save(folder, step=step, model=model, optimizer=optimizer, scaler={}, facts={"seed": 1})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
    ],
)
def test_a_loaded_checkpoint_goes_on_to_the_same_bits(
    tmp_path: Path, kind: type[torch.optim.Optimizer], settings: dict[str, object]
) -> None:
    model, optimizer = trained(kind, **settings)
    path = checkpoints.save(
        RunFolder(tmp_path), step=3, model=model, optimizer=optimizer, scaler={"scale": 2.0}, facts={"a": 1}
    )
    other = Tied()
    other_optimizer = kind(other.parameters(), lr=0.1, **settings)  # type: ignore[call-arg]
    found = checkpoints.open_checkpoint(path)
    checkpoints.load(found, model=other, optimizer=other_optimizer)
    assert (found.step, found.scaler, found.facts) == (3, {"scale": 2.0}, {"a": 1})
    for m, o in ((model, optimizer), (other, other_optimizer)):
        o.zero_grad()
        m.head(m.norm(m.embedding(torch.arange(7)))).square().mean().backward()
        o.step()
    assert checkpoints.weights_sha256(model) == checkpoints.weights_sha256(other)


def test_a_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "run.json",
    ]
    for file in path.iterdir():
        assert b"pickle" not in file.read_bytes() and not file.read_bytes().startswith((b"\x80", b"PK"))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "run.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damage_of_any_kind_to_any_file_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, file: str, harm: str
) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 10)
    target = save(folder, 20) / file
    data = bytearray(target.read_bytes())
    if harm == "flip":
        data[data.find(b"sha256") + 12 if file == "manifest.json" else len(data) // 2] ^= 1
        target.write_bytes(data)
    elif harm == "truncate":
        target.write_bytes(data[: len(data) // 2])
    else:
        target.unlink()
    said: list[str] = []
    found = checkpoints.newest_valid(folder, warn=said.append)
    assert found is not None and found.step == 10
    assert "step-00000020 is damaged" in said[0]
    assert (file if file != "manifest.json" or harm != "flip" else "model.safetensors") in said[0]
    assert (folder.checkpoints / "step-00000020.damaged").exists()


def test_a_save_that_fails_leaves_the_previous_checkpoint_and_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    save(folder, 10)

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(folder, 20)
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step-00000010"]


def test_only_the_newest_checkpoints_are_kept_and_a_killed_savers_leftovers_go(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 10):
        save(folder, step)
    (folder.checkpoints / ".step-00000003.partial-99").mkdir()
    checkpoints.prune(folder, keep=2)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step-00000002", "step-00000010"]


def test_the_fingerprint_sees_every_bit_name_and_type(tmp_path: Path) -> None:
    model, _ = trained()
    before = checkpoints.weights_sha256(model)
    with torch.no_grad():
        model.norm.bias[0] = torch.nextafter(model.norm.bias[0], torch.tensor(9.0))  # type: ignore[union-attr,operator,index]
    assert checkpoints.weights_sha256(model) != before
    assert checkpoints.weights_sha256(nn.Sequential(nn.Linear(2, 2))) != checkpoints.weights_sha256(nn.Linear(2, 2))


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1)
    with pytest.raises(CheckpointError, match="is of another model") as raised:
        checkpoints.load(checkpoints.open_checkpoint(path), model=nn.Linear(2, 2), optimizer=None)
    assert "config.toml" in raised.value.fix


def test_resume_from_accepts_a_run_or_a_checkpoint_and_names_what_is_neither(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    path = save(folder, 4)
    empty = RunFolder(tmp_path / "new")
    for resume_from in (str(path), str(folder.path)):
        found = checkpoints.find(resume_from, empty, warn=print)
        assert found is not None and found.step == 4
    assert checkpoints.find("auto", empty, warn=print) is None
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        checkpoints.find(str(tmp_path / "nowhere"), empty, warn=print)
