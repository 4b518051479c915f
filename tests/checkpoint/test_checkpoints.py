"""Checkpoints: complete or absent, and nothing lost between saving and loading. What harms them: test_damage.py."""

import json
from pathlib import Path

import pytest
import torch
from helpers.saved import Tied, save, trained
from torch import nn

from drumline.checkpoint import checkpoints
from drumline.checkpoint.checkpoints import RunState, commit, open_checkpoint
from drumline.checkpoint.newest import newest_valid
from drumline.checkpoint.restoring import load
from drumline.checkpoint.state import optimizer_state, tensors_of, weights_sha256
from drumline.checkpoint.storage import FileFacts, write_tensors
from drumline.errors import CheckpointError
from drumline.files.run_folder import RunFolder
from drumline.pieces.planning import divide


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
    ],
)
def test_a_loaded_checkpoint_goes_on_to_the_same_bits_however_many_ranks_wrote_it(
    tmp_path: Path, kind: type[torch.optim.Optimizer], settings: dict[str, object], parts: int
) -> None:
    model, optimizer = trained(kind, **settings)  # type: ignore[arg-type]
    aside = tmp_path / "aside"
    aside.mkdir()
    tensors = tensors_of(model, optimizer)
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    files: FileFacts = {}
    for part, names in enumerate(divide(sizes, parts)):
        own = {name: tensors[name] for name in names}
        files |= write_tensors(own, aside, part=part, parts=parts, reached=lambda point: None)
    state = RunState(
        step=3,
        facts={"a": 1},
        scaler={"scale": 2.0},
        optimizer=optimizer_state(model, optimizer)[1],
        detours=[[1, 2]],
        valid_loss=0.5,
    )
    commit(aside, tmp_path / "step-00000003", state, files, about={})
    checkpoint = open_checkpoint(tmp_path / "step-00000003")
    assert checkpoint.state == state
    other = Tied()
    other_optimizer = kind(other.parameters(), lr=0.1, **settings)  # type: ignore[call-arg,arg-type]
    load(checkpoint, model=other, optimizer=other_optimizer)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        o.zero_grad()
        m.head(m.norm(m.embedding(torch.arange(7)))).square().mean().backward()
        o.step()
    assert weights_sha256(model) == weights_sha256(other)


def test_a_checkpoint_holds_no_pickle(tmp_path: Path) -> None:
    path = save(RunFolder(tmp_path), 1, parts=2)
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
        "run.json",
    ]
    for file in path.iterdir():
        assert b"pickle" not in file.read_bytes() and not file.read_bytes().startswith((b"\x80", b"PK"))


def test_parts_are_about_as_large_as_each_other_and_the_same_on_every_rank() -> None:
    sizes = {f"tensor{n}": n**3 % 101 + 1 for n in range(50)}
    dealt = divide(sizes, 4)
    assert dealt == divide(dict(reversed(sizes.items())), 4)
    assert sorted(name for part in dealt for name in part) == sorted(sizes)
    loads = [sum(sizes[name] for name in part) for part in dealt]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_the_fingerprint_sees_every_bit_name_and_type() -> None:
    model, _ = trained()
    before = weights_sha256(model)
    with torch.no_grad():
        model.norm.bias[0] = torch.nextafter(model.norm.bias[0], torch.tensor(9.0))
    assert weights_sha256(model) != before
    assert weights_sha256(nn.Sequential(nn.Linear(2, 2))) != weights_sha256(nn.Linear(2, 2))


def test_a_checkpoint_of_another_model_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(RunFolder(tmp_path), 1))
    with pytest.raises(CheckpointError, match="is from a different model") as raised:
        load(checkpoint, model=nn.Linear(2, 2), optimizer=None)
    assert "config.toml" in raised.value.fix


def test_a_checkpoint_is_read_again_before_it_gets_its_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    aside = tmp_path / "aside"
    aside.mkdir()
    model, optimizer = trained()
    files = write_tensors(tensors_of(model, optimizer), aside, part=0, parts=1, reached=lambda point: None)
    next(aside.glob("model*")).write_bytes(b"what the disk made of it")
    with pytest.raises(CheckpointError, match="bytes, not"):
        commit(aside, folder.checkpoint(1), RunState(step=1, facts={}), files, about={})
    assert not folder.checkpoint(1).exists()


def test_a_checkpoint_of_another_version_is_named_and_never_set_aside(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    path = save(folder, 1)
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": {}}))
    with pytest.raises(CheckpointError, match="has format 1, this drumline reads 2"):
        newest_valid(folder.checkpoints, warn=print)
    assert path.exists()


def test_checkpoints_are_ordered_by_their_steps_however_long_those_are(tmp_path: Path) -> None:
    for name in ("step-100000000", "step-99999999", "step-00000007", "step-00000008.damaged", "step-x"):
        (tmp_path / name).mkdir()
    names = [path.name for path in checkpoints.checkpoint_paths(tmp_path)]
    assert names == ["step-00000007", "step-99999999", "step-100000000"]
