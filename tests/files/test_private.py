"""A run folder that came from elsewhere, and names that all users of a machine share, lead nowhere else."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.checkpoint import resuming
from drumline.cli.app import run_command
from drumline.files.private import make_private
from drumline.files.run_folder import RunFolder
from drumline.parallel.world import Place, World

Train = Callable[..., int]
MORE = ("--run_dir", "run", "--allow_change", "total_steps", "--total_steps", "9")


@pytest.fixture
def run(train: Train, tmp_path: Path) -> Path:
    assert train("--run_dir", "run", "--total_steps", "3") == 0
    return tmp_path / "run"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(resuming, "MEMORY", folder)
    return folder


@pytest.mark.parametrize(
    "identity", ["../../../precious", "/precious", "precious", "", "0" * 31 + "/", "\x00", "é" * 32]
)
def test_the_id_of_a_run_is_never_a_path(
    run: Path, memory: Path, tmp_path: Path, train: Train, identity: str, caplog: pytest.LogCaptureFixture
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (run / ".id").write_text(str(precious) if identity == "/precious" else identity)
    assert train(*MORE, "--snapshot_every", "1") == 0
    assert (precious / "file").exists()
    assert ("is no id of a run; it gets a new one" in caplog.text) == bool(identity)
    found = RunFolder(run).run_id()
    assert len(found) == 32 and found == (run / ".id").read_text() and set(found) <= set("0123456789abcdef")


def test_memory_that_another_user_or_a_link_has_taken_is_not_used(
    run: Path,
    memory: Path,
    tmp_path: Path,
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken, elsewhere, world = memory / f"drumline-{os.getuid()}", tmp_path / "elsewhere", World(Place(), "cpu")  # type: ignore[arg-type]
    elsewhere.mkdir()
    taken.symlink_to(elsewhere)
    assert resuming.find_snapshots(RunFolder(run), world, takes=True) is None
    assert "is not used: it is a link, or belongs to another user" in caplog.text
    assert train(*MORE, "--snapshot_every", "1") == 0
    assert not list(elsewhere.iterdir())
    taken.unlink()
    taken.mkdir(mode=0o755)
    assert make_private(taken) and taken.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: taken.stat().st_uid + 1)
    assert not make_private(taken)
    monkeypatch.undo()
    assert make_private(memory / "new") and (memory / "new").stat().st_mode & 0o777 == 0o700
    assert make_private(memory / "no/such/place")


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoints", "checkpoints/step-00000009", "metrics.jsonl", ".lock", "tokenizer.json"),
        *("metrics.jsonl.damaged", ".metrics.jsonl.PID", "evals/step-00000003.json", "wandb"),
    ],
)
def test_links_that_lead_out_of_a_run_folder_are_not_followed_to_write_or_delete(
    run: Path, tmp_path: Path, train: Train, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious"
    path = run / name.replace("PID", str(os.getpid()))
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(precious)
    elif "." in path.name:
        precious.write_text("a key\n")
    else:
        precious.mkdir()
    if name.startswith((".", "metrics.jsonl.")):  # what is written when a line is set aside
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write("a damaged line\n")
    before = sorted((each.name, each.lstat().st_mtime_ns) for each in [precious, *precious.glob("*")])
    path.symlink_to(precious)
    capsys.readouterr()
    for words in (["checkpoint", "prune", "run", "--keep", "1"], ["train", *MORE]):
        code = run_command(words) if words[0] == "checkpoint" else train(*MORE)
        error, fix = capsys.readouterr().err.splitlines()
        assert code == 1 and fix.startswith("  fix: ")
        assert f"{path.relative_to(tmp_path)} is a link to " in error or "Too many levels of symbolic links" in error
    assert sorted((each.name, each.lstat().st_mtime_ns) for each in [precious, *precious.glob("*")]) == before
    assert json.loads((run / "status.json").read_text())["step"] == 3


def test_links_within_a_run_folder_are_fine(run: Path, train: Train) -> None:
    (run / "metrics.jsonl").rename(run / "all.jsonl")
    (run / "metrics.jsonl").symlink_to("all.jsonl")
    assert train(*MORE) == 0


@pytest.mark.parametrize("name", ["config.toml", "data.json", "status.json", ".id", "tokenizer.json", "metrics.jsonl"])
def test_a_pipe_in_a_run_folder_keeps_no_command_waiting(
    run: Path, train: Train, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    for words in ("checkpoint list run", "sample run --prompt a", "evaluate run"):
        capsys.readouterr()
        assert run_command(words.split()) == 1
        error, fix = capsys.readouterr().err.splitlines()
        assert error.startswith(f"error: run/{name} is neither a file nor a folder") and fix.startswith("  fix: ")
    capsys.readouterr()
    assert train(*MORE) == 1 and f"run/{name} is neither" in capsys.readouterr().err
    assert run_command(["runs", "."]) == 0 and "run/" not in capsys.readouterr().out


def test_a_checkpoint_that_is_a_link_to_nowhere_is_listed_as_not_used(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-00000099").symlink_to("nowhere")
    capsys.readouterr()
    assert run_command(["checkpoint", "list", "run"]) == 0
    assert "not used: a link to nowhere" in capsys.readouterr().out
