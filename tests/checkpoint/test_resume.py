"""Where a run goes on from: by itself its newest valid checkpoint, or what --resume_from names."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.saved import ALONE, save, trained

from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.checkpoint.export import write_single_file
from drumline.checkpoint.newest import find
from drumline.checkpoint.restoring import resume
from drumline.checkpoint.resuming import check_resume
from drumline.checkpoint.retention import step_of
from drumline.errors import CheckpointError
from drumline.files.run_folder import RunFolder
from drumline.report.records import read_metrics
from drumline.snapshots.folder import Snapshots

Train = Callable[..., int]


def steps(folder: RunFolder) -> list[int]:
    return [step_of(path) for path in checkpoint_paths(folder.checkpoints)]


def test_a_run_a_checkpoint_a_step_and_a_pt_can_be_named_and_what_is_none_of_them_is_refused(tmp_path: Path) -> None:
    folder, new = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "new")
    for step in (4, 6):
        path = save(folder, step)
    write_single_file(open_checkpoint(path), tmp_path / "six.pt")
    for resume_from in (str(path), str(folder.path), str(tmp_path / "six.pt")):
        check_resume(resume_from, new)
        checkpoint = find(resume_from, new, say=print)
        assert checkpoint is not None and checkpoint.step == 6
    checkpoint = find("4", folder, say=print)
    assert checkpoint is not None and checkpoint.step == 4
    assert find("auto", new, say=print) is None
    for nothing in ("5", str(tmp_path / "nowhere"), str(tmp_path / "nowhere.pt"), str(new.path)):
        with pytest.raises(CheckpointError, match=r"neither a checkpoint nor a run .*: 4, 6\)"):
            check_resume(nothing, folder)


def test_a_run_told_to_go_back_leaves_its_newer_checkpoints_aside_and_ends_with_the_same_bits(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--bitwise", "--save_every", "2", "--run_dir", "run", "--keep_checkpoints", "9"]
    assert train(*flags) == 0
    folder = RunFolder(Path("run"))
    before = folder.read_status()["weights_sha256"]
    capsys.readouterr()
    assert train(*flags, "--resume_from", "2") == 0
    said = capsys.readouterr().out
    assert "step-00000004 is newer than the step resumed from: renamed to step-00000004.superseded" in said
    assert "resuming from run/checkpoints/step-00000002 (step 2)" in said
    assert folder.read_status()["weights_sha256"] == before and steps(folder) == [2, 4, 6]
    assert [r["step"] for r in read_metrics(folder.metrics) if "loss" in r] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("form", ["checkpoint", "pt"])
def test_a_run_that_goes_on_from_elsewhere_does_not_meet_its_own_newer_checkpoints_again(
    tmp_path: Path, form: str
) -> None:
    folder, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    for step in (2, 4, 6):
        save(folder, step)
    path = save(other, 4)
    if form == "pt":
        write_single_file(open_checkpoint(path), tmp_path / "four.pt")
        path = tmp_path / "four.pt"
    model, optimizer = trained()
    memory = Snapshots(tmp_path / "memory", folder.path)
    checkpoint = resume(
        str(path), folder, ALONE, model, optimizer, facts={}, allow_change=(), snapshots=memory, say=lambda line: None
    )
    assert checkpoint is not None and checkpoint.step == 4 and steps(folder) == [2]
    assert all((folder.checkpoints / f"step-0000000{step}.superseded").exists() for step in (4, 6))


def test_a_resume_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (2, 4):
        save(folder, step)
    arguments = {"facts": {"seed": 2}, "snapshots": Snapshots(tmp_path / "memory", folder.path), "say": print}
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match=r"different settings \(seed 1 -> 2\)"):
        resume("2", folder, ALONE, model, optimizer, allow_change=(), **arguments)  # type: ignore[arg-type]
    assert steps(folder) == [2, 4]
    resume("2", folder, ALONE, model, optimizer, allow_change=["seed"], **arguments)  # type: ignore[arg-type]
    assert steps(folder) == [2]


def test_a_disk_that_takes_no_mark_keeps_no_run_from_going_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    save(folder, 2)
    folder.resumed = tmp_path / "not there" / ".resumed"
    model, optimizer = trained()
    memory = Snapshots(tmp_path / "memory", folder.path)
    checkpoint = resume("2", folder, ALONE, model, optimizer, facts={}, allow_change=(), snapshots=memory, say=print)
    assert checkpoint is not None and checkpoint.step == 2


@pytest.mark.parametrize("broke", ["before it was resumed", "before its first save", "after a save"])
def test_a_run_told_where_to_go_on_and_started_again_neither_begins_anew_nor_goes_back_again(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broke: str
) -> None:
    flags = ["--bitwise", "--save_every", "2", "--keep_checkpoints", "9"]
    assert train(*flags, "--run_dir", "first") == 0
    resume_flags = [*flags, "--run_dir", "second", "--resume_from", "first/checkpoints/step-00000002"]
    second = RunFolder(Path("second"))
    if broke != "before it was resumed":
        assert train(*resume_flags) == 0
        for path in checkpoint_paths(second.checkpoints)[1 if broke == "after a save" else 0 :]:
            shutil.rmtree(path)
    capsys.readouterr()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(*resume_flags) == 0
    source = second if broke == "after a save" else RunFolder(Path("first"))
    assert f"resuming from {source.checkpoint(2)} (step 2)" in capsys.readouterr().out
    assert second.read_status()["weights_sha256"] == RunFolder(Path("first")).read_status()["weights_sha256"]
    assert [r["step"] for r in read_metrics(second.metrics) if "loss" in r] == [3, 4, 5, 6]


def test_a_run_whose_checkpoints_are_all_damaged_says_that_it_starts_again(
    train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "run", "--save_every", "6") == 0
    run = RunFolder(Path("run"))
    (run.checkpoint(6) / "run.json").write_text("harm")
    capsys.readouterr()
    assert train("--run_dir", "run", "--save_every", "6") == 0
    out = capsys.readouterr().out
    assert "renamed to step-00000006.damaged\nwarning: no valid checkpoint is left: starting again from step 0\n" in out
    assert (run.checkpoints / "step-00000006.damaged").is_dir()
    assert train("--run_dir", "new") == 0 and "no valid checkpoint" not in capsys.readouterr().out
    assert run.read_status()["weights_sha256"] == RunFolder(Path("new")).read_status()["weights_sha256"]
