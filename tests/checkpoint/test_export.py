"""A checkpoint as one .pt file, which a run goes on from to the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.saved import save

from drumline.checkpoint import export
from drumline.checkpoint.checkpoints import open_checkpoint
from drumline.checkpoint.export import open_single_file, write_single_file
from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder

Train = Callable[..., int]


def test_a_pt_holds_what_the_checkpoint_holds_and_torch_reads_it_without_drumline(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(RunFolder(tmp_path), 7, valid_loss=1.5, parts=2))
    write_single_file(checkpoint, tmp_path / "one.pt")
    exported = open_single_file(tmp_path / "one.pt")
    assert exported.state == checkpoint.state and exported.tensors is not None
    plain = torch.load(tmp_path / "one.pt", weights_only=True)
    assert plain["run"]["step"] == 7 and set(plain["model"]) | set(plain["optimizer"]) == set(exported.tensors)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_pt_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(save(RunFolder(tmp_path / "run"), 7))

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "flush", full)
    with pytest.raises(OSError, match="No space left"):
        write_single_file(checkpoint, tmp_path / "one.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_goes_on_from_an_exported_file_ends_with_the_same_bits(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--bitwise", "--save_every", "2", "--dropout", "0.2"]
    assert train(*flags, "--run_dir", "whole") == 0
    assert run_command(["checkpoint", "export", "whole", "--step", "2", "--out", "two.pt"]) == 0
    assert "--resume_from two.pt" in capsys.readouterr().out
    assert train(*flags, "--run_dir", "other", "--resume_from", "two.pt") == 0
    assert "resuming from two.pt (step 2)" in capsys.readouterr().out
    digests = {RunFolder(Path(run)).read_status()["weights_sha256"] for run in ("whole", "other")}
    assert len(digests) == 1
