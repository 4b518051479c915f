"""`drumline checkpoint`: what a run has saved is listed, verified, exported and pruned, and errors are for people."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.saved import save, trained

from drumline.checkpoint.checkpoints import checkpoint_paths
from drumline.checkpoint.export import open_single_file
from drumline.checkpoint.in_memory import snapshots_of
from drumline.checkpoint.retention import step_of
from drumline.checkpoint.state import tensors_of
from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: None}
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with checkpoints of steps 10 to 40, the best of them at 20."""
    folder = RunFolder(tmp_path / "run")
    for step, loss in LOSSES.items():
        save(folder, step, valid_loss=loss)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], folder: RunFolder) -> Command:
    """`drumline checkpoint WORDS[0] RUN WORDS[1:]`: exit code, what it printed, and its error."""

    def run(*words: str, where: Path | None = None) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command(["checkpoint", words[0], str(where or folder.path), *words[1:]])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def steps(folder: RunFolder) -> list[int]:
    return [step_of(path) for path in checkpoint_paths(folder.checkpoints)]


def tree(folder: RunFolder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.checkpoints.rglob("*") if path.is_file()}


def harm(folder: RunFolder, step: int) -> None:
    (file,) = folder.checkpoint(step).glob("model*")
    os.truncate(file, 9)


def test_the_list_says_of_each_checkpoint_why_it_is_kept_or_not_used(folder: RunFolder, command: Command) -> None:
    save(folder, 50)
    folder.checkpoint(50).rename(folder.checkpoints / "step-00000050.superseded")
    snapshots = snapshots_of(folder)
    snapshots.store(tensors_of(*trained()), 45, {}, token="any")
    try:
        code, said, _ = command("list")
    finally:
        snapshots.clear()
    assert code == 0
    rows = [line.split() for line in said.splitlines()[1:]]
    assert [(row[0], row[4], " ".join(row[5:])) for row in rows] == [
        ("10", "3.0000", "deleted at the next save"),
        ("20", "1.0000", "last 3, best"),
        ("30", "2.0000", "last 3"),
        ("40", "-", "newest"),
        ("50", "-", "not used: superseded"),
        ("45", "-", "in memory"),
    ]
    assert all(row[3].endswith("kB") for row in rows)


def test_verify_says_what_is_wrong_with_each_and_changes_nothing(folder: RunFolder, command: Command) -> None:
    code, said, _ = command("verify")
    assert code == 0 and [line.endswith(": ok") for line in said.splitlines()] == [True] * 4
    harm(folder, 30)
    before = tree(folder)
    code, said, _ = command("verify")
    assert code == 1 and tree(folder) == before
    lines = said.splitlines()
    assert [line.endswith(": ok") for line in lines] == [True, False, True, True]
    assert "step-00000030 is damaged: model-00001-of-00001.safetensors has 9 bytes" in lines[1]
    assert command("verify", "--step", "20")[0] == 0
    assert command("verify", "--step", "30")[0] == 1


def test_verify_tells_of_what_was_set_aside(folder: RunFolder, command: Command) -> None:
    for step, why in ((30, "superseded"), (40, "damaged")):
        folder.checkpoint(step).rename(folder.checkpoints / f"step-000000{step}.{why}")
    code, said, _ = command("verify")
    assert code == 0
    assert [line.partition(": ")[2].partition("; ")[0] for line in said.splitlines()] == [
        "ok",
        "ok",
        "set aside as damaged, not used",
        "set aside: the run went back before it, not used",
    ]
    assert "set aside" not in command("verify", "--step", "20")[1]
    for step in (10, 20):
        folder.checkpoint(step).rename(folder.checkpoints / f"step-000000{step}.damaged")
    code, _, error = command("verify")
    assert code == 1 and "has no checkpoints" in error and error.count("was set aside") == 4


def test_export_writes_the_newest_valid_one_and_replaces_nothing_unless_forced(
    folder: RunFolder, command: Command, tmp_path: Path
) -> None:
    harm(folder, 40)
    code, said, _ = command("export")
    file = folder.checkpoints / "checkpoint_step_30.pt"
    assert code == 0 and open_single_file(file).step == 30 and steps(folder) == [10, 20, 30, 40]
    assert "step-00000040 is damaged" in said and "; using step-00000030 instead" in said
    assert f"drumline train --run_dir {folder.path} --resume_from {file}" in said
    file.write_bytes(b"something")
    code, _, error = command("export")
    assert code == 1 and "already exists" in error and "--force" in error and file.read_bytes() == b"something"
    assert command("export", "--force")[0] == 0 and open_single_file(file).step == 30
    assert command("export", "--step", "10", "--out", str(tmp_path / "ten.pt"))[0] == 0
    assert open_single_file(tmp_path / "ten.pt").step == 10
    assert command("export", "--step", "10", "--out", str(tmp_path / "a/b/ten.pt"))[0] == 0
    assert command("export", "--step", "20", "--out", str(tmp_path / "a"))[0] == 0
    assert [open_single_file(tmp_path / "a" / name).step for name in ("b/ten.pt", "checkpoint_step_20.pt")] == [10, 20]
    code, _, error = command("export", "--out", str(tmp_path / "ten.pt/where.pt"))
    assert code == 1 and "is not writable" in error and "--out" in error
    code, _, error = command("export", "--step", "40")
    assert code == 1 and "is damaged" in error


def test_prune_keeps_the_newest_every_so_many_and_the_best_and_says_what_went(
    folder: RunFolder, command: Command
) -> None:
    for name in ("step-00000005.damaged", "step-00000006.superseded", ".step-00000007.partial-x-1"):
        (folder.checkpoints / name).mkdir()
    (folder.checkpoints / ".seen-x").touch()
    before = tree(folder)
    code, said, _ = command("prune", "--keep", "1", "--dry_run")
    assert code == 0 and tree(folder) == before and "would delete" in said and "6 to delete, " in said
    size = sum(len(content) for name, content in before.items() if "-00000010" in name or "-00000030" in name)
    code, said, _ = command("prune", "--keep", "1")
    assert code == 0 and f"6 deleted, {size:,} bytes" in said
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-00000020", "step-00000040"]
    assert command("prune", "--keep", "1", "--no-keep_best", "--keep_every", "20")[0] == 0
    assert steps(folder) == [20, 40]
    assert command("prune", "--keep", "1", "--no-keep_best")[0] == 0
    assert steps(folder) == [40]
    code, _, error = command("prune", "--keep", "0")
    assert code == 1 and "keep is 0" in error and steps(folder) == [40]


def test_prune_never_deletes_the_only_valid_checkpoint(folder: RunFolder, command: Command) -> None:
    for step in (20, 30, 40):
        harm(folder, step)
    code, said, _ = command("prune", "--keep", "1", "--no-keep_best")
    assert code == 0 and steps(folder) == [10] and "warning" in said and "step-00000040 is damaged" in said
    harm(folder, 10)
    code, _, error = command("prune", "--keep", "1")
    assert code == 1 and "the only checkpoint" in error and steps(folder) == [10]


def test_prune_takes_what_the_run_keeps_from_its_config(folder: RunFolder, command: Command) -> None:
    folder.config.write_text("keep_checkpoints = 1\nkeep_every = 10\n")
    assert command("prune")[0] == 0 and steps(folder) == [10, 20, 30, 40]
    assert command("prune", "--keep_every", "40")[0] == 0 and steps(folder) == [20, 40]


def test_prune_is_refused_while_the_run_is_trained(folder: RunFolder, command: Command) -> None:
    with folder.hold():
        code, _, error = command("prune", "--keep", "1")
    assert code == 1 and "is in use" in error and steps(folder) == [10, 20, 30, 40]


@pytest.mark.parametrize("word", ["list", "verify", "export", "prune"])
def test_what_is_not_there_is_answered_with_what_is(
    folder: RunFolder, command: Command, tmp_path: Path, word: str
) -> None:
    code, _, error = command(word, where=tmp_path / "nowhere")
    assert code == 1 and "is not a run" in error and not (tmp_path / "nowhere").exists()
    empty = RunFolder(tmp_path / "empty")
    empty.checkpoints.mkdir(parents=True)
    code, _, error = command(word, where=empty.path)
    assert code == 1 and "has no checkpoints" in error
    if word in ("verify", "export"):
        code, _, error = command(word, "--step", "7")
        assert code == 1 and "no checkpoint of step 7" in error and "10, 20, 30, 40" in error


def test_a_checkpoint_of_another_version_is_neither_deleted_nor_called_damaged(
    folder: RunFolder, command: Command
) -> None:
    (folder.checkpoint(40) / "manifest.json").write_text(json.dumps({"format": 9}))
    code, _, error = command("prune", "--keep", "1")
    assert code == 1 and "has format 9" in error and steps(folder) == [10, 20, 30, 40]
    assert "has format 9" in command("verify", "--step", "40")[1]
