"""Harm of every kind to every file of a checkpoint is noticed, and nothing in a checkpoint is ever executed."""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.saved import Tied, flipped, save

from drumline.checkpoint import checkpoints
from drumline.checkpoint.checkpoints import open_checkpoint
from drumline.checkpoint.export import open_single_file, write_single_file
from drumline.checkpoint.newest import find, newest_valid
from drumline.checkpoint.restoring import load
from drumline.errors import CheckpointError
from drumline.files.disk import file_sha256
from drumline.files.run_folder import RunFolder

FILES = [
    *(f"{kind}-0000{part}-of-00002.safetensors" for kind in ("model", "optimizer") for part in (1, 2)),
    "run.json",
    "manifest.json",
]
FLIPS = 300


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder(tmp_path_factory.mktemp("pristine"))
    for step in (10, 20):
        save(folder, step, parts=2)
    return folder.path


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> RunFolder:
    """A run with checkpoints of steps 10 and 20."""
    shutil.copytree(pristine, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def truncate_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zero_a_page(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(bytes(min(4096, len(content))) + content[4096:])


def remove(file: Path) -> None:
    file.unlink()


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def take_the_other_checkpoints(file: Path) -> None:
    shutil.copy(file.parent.with_name("step-00000010") / file.name, file)


def make_a_link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def make_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


HARMS = (
    truncate,
    truncate_half,
    empty,
    zero_a_page,
    remove,
    grow,
    take_the_other_checkpoints,
    make_a_link,
    make_a_folder,
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", HARMS)
def test_harm_to_any_file_is_noticed_and_the_checkpoint_before_is_used(
    folder: RunFolder, name: str, harm: Callable[[Path], None]
) -> None:
    harm(folder.checkpoint(20) / name)
    said: list[str] = []
    checkpoint = newest_valid(folder.checkpoints, warn=said.append)
    assert checkpoint is not None and checkpoint.step == 10
    assert len(said) == 1 and "step-00000020 is damaged" in said[0] and "renamed to step-00000020.damaged" in said[0]
    assert name in said[0] or harm in (take_the_other_checkpoints, make_a_link)
    assert (folder.checkpoints / "step-00000020.damaged").exists() and not folder.checkpoint(20).exists()


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_in_any_file_is_noticed(folder: RunFolder, name: str) -> None:
    file, draw = folder.checkpoint(20) / name, random.Random(name)
    content = file.read_bytes()
    for _ in range(FLIPS):
        file.write_bytes(flipped(content, draw))
        with pytest.raises(CheckpointError, match="is damaged"):
            open_checkpoint(file.parent)
    file.write_bytes(content)
    assert open_checkpoint(file.parent).step == 20


def test_a_checkpoint_under_the_name_of_another_step_is_noticed(folder: RunFolder) -> None:
    folder.checkpoint(20).rename(folder.checkpoint(30))
    with pytest.raises(CheckpointError, match="it is of step 20, not of the step in its name"):
        open_checkpoint(folder.checkpoint(30))


def test_tensors_that_the_manifest_does_not_name_are_noticed(folder: RunFolder) -> None:
    shutil.copy(folder.checkpoint(20) / FILES[0], folder.checkpoint(20) / "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors, which"):
        open_checkpoint(folder.checkpoint(20))


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it a hash that agrees, as anyone can."""
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    manifest.pop("sha256")
    (path / "manifest.json").write_text(checkpoints._sealed(manifest))


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "../step-00000010/run.json", ".metadata", "model.bin", ""])
def test_a_manifest_that_names_what_no_checkpoint_has_is_refused(folder: RunFolder, name: str) -> None:
    path = folder.checkpoint(20)
    reseal(path, lambda manifest: manifest["files"].update({name: {"bytes": 1, "sha256": "0"}}))
    with pytest.raises(CheckpointError, match="which is not a file of a checkpoint"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "7", "[" * 100_000, "\ufeff{}"),
        *('{"format": 2}', '{"format": 2, "files": [], "step": 1}', '{"format": 2, "step": 1e999, "files": {}}'),
        '{"format": 2, "step": 1, "files": {"run.json": 5}}',
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "run.json"])
def test_json_of_any_other_shape_is_called_damage(folder: RunFolder, name: str, text: str) -> None:
    path = folder.checkpoint(20)
    (path / name).write_text(text)
    facts = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    if name == "run.json":
        reseal(path, lambda manifest: manifest["files"].update({name: facts}))
    with pytest.raises(CheckpointError, match=f"its {name} cannot be read"):
        open_checkpoint(path)


def test_a_disk_that_fails_while_it_is_read_counts_as_damage(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_sha256

    def bad_sector(path: Path) -> str:
        if path.parent.name == "step-00000020":
            raise OSError(5, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(checkpoints, "file_sha256", bad_sector)
    said: list[str] = []
    checkpoint = newest_valid(folder.checkpoints, warn=said.append)
    assert checkpoint is not None and checkpoint.step == 10 and "Input/output error" in said[0]


def test_a_damaged_checkpoint_on_a_disk_that_cannot_be_written_is_passed_over(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate(folder.checkpoint(20) / "run.json")

    def read_only(path: Path, target: Path) -> Path:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", read_only)
    said: list[str] = []
    checkpoint = newest_valid(folder.checkpoints, warn=said.append)
    assert checkpoint is not None and checkpoint.step == 10
    assert "it cannot be renamed (Read-only file system)" in said[0]


class Payload:
    """What a stranger's pickle does to whoever opens it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", [*FILES, ".metadata"])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_pickle_in_the_place_of_any_file_is_never_opened(
    folder: RunFolder, tmp_path: Path, name: str, sealed: bool
) -> None:
    path, marker = folder.checkpoint(20), tmp_path / "executed"
    evil = pickle.dumps(Payload(marker))
    (path / name).write_bytes(evil)
    facts = {"bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
    if sealed and name not in ("manifest.json", ".metadata"):
        reseal(path, lambda manifest: manifest["files"].update({name: facts}))
    model = Tied()
    # A .metadata, which torch would unpickle, is read by nobody.
    with nullcontext() if name == ".metadata" else pytest.raises(CheckpointError, match=path.name):
        load(open_checkpoint(path), model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists()  # it would have worked


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", ["pickle", "torch", "old torch", "inside"])
def test_a_strangers_pt_runs_nothing(folder: RunFolder, tmp_path: Path, form: str) -> None:
    file, marker = tmp_path / "stranger.pt", tmp_path / "executed"
    if form == "pickle":
        file.write_bytes(pickle.dumps(Payload(marker)))
    else:
        write_single_file(open_checkpoint(folder.checkpoint(20)), file)
        content = torch.load(file, weights_only=True) if form == "inside" else {}
        content["run"] = Payload(marker)
        torch.save(content, file, _use_new_zipfile_serialization=form != "old torch")
    with pytest.raises(CheckpointError, match="which could run any code when loaded"):
        find(str(file), folder, say=print)
    assert not marker.exists()


def test_a_damaged_pt_is_refused_or_the_harm_is_where_nothing_is_read(folder: RunFolder, tmp_path: Path) -> None:
    file, draw = tmp_path / "one.pt", random.Random(0)
    write_single_file(open_checkpoint(folder.checkpoint(20)), file)
    content, good = file.read_bytes(), open_single_file(file)
    assert good.tensors is not None
    harmed = [flipped(content, draw) for _ in range(FLIPS)]
    harmed += [content[: draw.randrange(len(content))] for _ in range(50)]
    harmed += [content[:at] + bytes(512) + content[at + 512 :] for at in range(0, len(content) - 512, 512)]
    refused = 0
    for each in harmed:
        file.write_bytes(each)
        try:
            opened = open_single_file(file)
        except CheckpointError:
            refused += 1
            continue
        assert opened.state == good.state and opened.tensors is not None
        assert all(torch.equal(opened.tensors[name], tensor) for name, tensor in good.tensors.items())
    assert refused > len(harmed) / 2


def test_a_pt_whose_tensors_were_exchanged_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "one.pt"
    write_single_file(open_checkpoint(folder.checkpoint(20)), file)
    content = torch.load(file, weights_only=True)
    content["model"]["norm.bias"] += 1
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="does not match its own hash"):
        open_single_file(file)
