"""A checkpoint in pieces is read by every command as a whole one is, with little memory."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.saved import state

from drumline.checkpoint.checkpoints import commit, open_checkpoint, read_state
from drumline.checkpoint.export import open_single_file, write_single_file
from drumline.checkpoint.storage import FileFacts, write_tensors
from drumline.cli.app import run_command
from drumline.files.disk import file_sha256
from drumline.files.run_folder import RunFolder
from drumline.pieces.folders import stored_in
from drumline.pieces.rows import cut, piece_name
from drumline.watch.cards import model_card

RANKS = 3


def cut_into_pieces(path: Path) -> None:
    """Rewrite a checkpoint as ranks of a sharded run write it."""
    stored, run = stored_in(path), read_state(path)
    tensors = {name: stored.read(name) for name in stored.shapes}
    aside = path.with_name(".aside")
    aside.mkdir()
    files: FileFacts = {}
    for rank in range(RANKS):
        own = {}
        for name, tensor in tensors.items():
            length = len(tensor) if tensor.ndim else 1
            start, stop = cut(length, rank, RANKS)
            if start < stop:
                own[piece_name(name, start, stop, length)] = tensor[start:stop] if tensor.ndim else tensor
        files |= write_tensors(own, aside, part=rank, parts=RANKS, reached=lambda point: None)
    manifest = json.loads((path / "manifest.json").read_text())
    shutil.rmtree(path)
    about = {name: manifest[name] for name in ("versions", "device", "config_sha256") if name in manifest}
    commit(aside, path, run, files, about=about)


def test_every_command_reads_a_checkpoint_in_pieces_as_a_whole_one(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--preset", "tiny", "--run_dir", "run", "--save_every", "3") == 0
    folder = RunFolder(Path("run"))

    def all_of_them(name: str) -> list[object]:
        capsys.readouterr()
        printed = []
        for words in (
            ["sample", "run", "--prompt", "the drum", "--seed", "3", "--max_tokens", "9"],
            ["evaluate", "run"],
            ["checkpoint", "verify", "run"],
            ["checkpoint", "list", "run"],
            ["checkpoint", "export", "run", "--out", f"{name}.pt"],
            ["export", "run", "-o", f"export-{name}"],
            ["diff", "run", "other"],
        ):
            if words[0] == "diff":
                shutil.copytree("run", "other")
            assert run_command(words) == 0, words
            said = capsys.readouterr().out.replace(name, "NAME")
            if words[:2] not in (["checkpoint", "list"], ["checkpoint", "verify"]):  # bytes and hashes differ
                printed.append(
                    "\n".join(line for line in said.splitlines() if "wrote" not in line and "/s" not in line)
                )
        shutil.rmtree("other")
        sha256 = file_sha256(tmp_path / f"export-{name}" / "model.safetensors")
        return [*printed, sha256, open_single_file(Path(f"{name}.pt")).tensors, model_card(folder)]

    before = all_of_them("whole")
    for step in (3, 6):
        cut_into_pieces(folder.checkpoint(step))
    assert any("@" in name for name in stored_in(folder.checkpoint(6)).names)
    after = all_of_them("pieces")
    for one, other in zip(before, after, strict=True):
        if isinstance(one, dict) and all(isinstance(each, torch.Tensor) for each in one.values()):
            assert isinstance(other, dict) and one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)
        else:
            assert one == other
    assert train("--preset", "tiny", "--run_dir", "run", "--save_every", "3", "--resume_from", "3") == 0
    assert "step-00000003 (step 3)" in capsys.readouterr().out


def test_a_single_file_is_written_with_the_memory_of_a_tensor(tmp_path: Path) -> None:
    folder, aside = RunFolder(tmp_path / "run"), tmp_path / "aside"
    aside.mkdir()
    tensors = {f"t{at}": torch.full((1024, 1024), float(at)) for at in range(32)}
    files = write_tensors(tensors, aside, part=0, parts=1, reached=lambda point: None)
    folder.checkpoints.mkdir(parents=True)
    commit(aside, folder.checkpoint(1), state(1), files, about={})
    every = sum(each.nbytes for each in tensors.values())
    del tensors
    checkpoint = open_checkpoint(folder.checkpoint(1))
    peak, done = [_private()], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak.append(_private())

    thread = threading.Thread(target=watch)
    thread.start()
    write_single_file(checkpoint, tmp_path / "one.pt")
    done.set()
    thread.join()
    assert max(peak) - peak[0] < every / 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pt", "run"]
    assert open_single_file(tmp_path / "one.pt").step == 1


def _private() -> int:
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * 4096
