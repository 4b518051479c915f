"""Runs that an earlier version began: this one goes on with them, reads them, and finds what their configs name.

previous_version/ holds runs of the version that had all its modules in one folder, killed after step 4 of 8, with their
text and prepared data: a classic GPT, a modern one by Muon, a user's own model, and a run by Trainer.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers.warm import run_warm

from drumline import plugins
from drumline.checkpoint.checkpoints import checkpoint_paths, open_checkpoint
from drumline.checkpoint.retention import step_of
from drumline.cli import run_command
from drumline.files.run_folder import RunFolder
from drumline.plugins import load_plugin, plugin_file
from drumline.report.records import read_metrics

RUNS = ["classic", "modern", "plugin"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(__file__).with_name("previous_version"), tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)


def losses(folder: RunFolder) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(folder.metrics) if "loss" in record}


def check_gone_on(folder: RunFolder, fresh: RunFolder, *, logged: list[int]) -> None:
    status = folder.read_status()
    assert (status["state"], status["step"]) == ("finished", 8)
    assert [step_of(path) for path in checkpoint_paths(folder.checkpoints)] == [4, 8]
    assert list(losses(folder)) == logged
    assert losses(folder) == pytest.approx(losses(fresh), rel=1e-4)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_to_the_losses_of_one_that_was_never_interrupted(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, fresh = RunFolder(Path("runs", name)), RunFolder(Path("fresh"))
    before = folder.config.read_text()
    named = ["--model", "my_models:Bigram"] if name == "plugin" else []  # once: earlier versions did not remember it
    assert run_command(["train", "--run_dir", str(folder.path), *named]) == 0
    assert f"resuming from {folder.checkpoint(4)} (step 4)" in capsys.readouterr().out
    assert run_command(["train", "--config", str(folder.config), "--run_dir", str(fresh.path)]) == 0
    check_gone_on(folder, fresh, logged=[1, 2, 3, 4, 5, 6, 7, 8])
    assert "my_models:Bigram" in before or name != "plugin"


def test_a_run_by_trainer_goes_on_as_well() -> None:
    for words in (["8"], ["8", "fresh"]):
        done = run_warm([sys.executable, "trainer_run.py", *words], timeout=120)
        assert done.returncode == 0, done.stderr
    check_gone_on(RunFolder(Path("runs/linear")), RunFolder(Path("fresh")), logged=[8])


def test_runs_and_their_checkpoints_can_be_listed_and_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs"]) == 0
    said = capsys.readouterr().out
    assert all(f"runs/{name}" in said for name in RUNS)
    for name in (*RUNS, "linear"):
        assert open_checkpoint(RunFolder(Path("runs", name)).checkpoint(4)).step == 4
        assert run_command(["checkpoint", "list", f"runs/{name}"]) == 0
        assert run_command(["checkpoint", "verify", f"runs/{name}"]) == 0


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_evaluated_and_writes(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    valid_losses = [r["valid_loss"] for r in read_metrics(Path("runs", name, "metrics.jsonl")) if "valid_loss" in r]
    assert run_command(["evaluate", f"runs/{name}", "--device", "cpu", "--trust"]) == 0
    assert "step 4" in capsys.readouterr().out and valid_losses
    writes = run_command(["sample", f"runs/{name}", "--prompt", "Document", "--max_tokens", "4", "--device", "cpu"])
    said = capsys.readouterr()
    if name == "plugin":  # its forward wants targets
        assert writes == 1 and "Bigram, returns no logits without targets" in said.err
    else:
        assert writes == 0 and said.out.startswith("Document")


@pytest.mark.parametrize("module", plugins.MOVED)
def test_a_module_that_has_moved_is_found_by_its_old_name(module: str) -> None:
    names = {
        "drumline.fused_gpt": ["FusedGPT", "Float8GPT"],
        "drumline.records": ["JsonlSink"],
        "drumline.trackers": ["TensorBoardSink", "WandbSink"],
        "drumline.text": ["documents"],
        "drumline.text_files": ["read_file"],
    }
    for name in names[module]:
        assert load_plugin(f"{module}:{name}") is load_plugin(f"{plugins.MOVED[module]}:{name}")
        assert plugin_file(f"{module}:{name}") == plugin_file(f"{plugins.MOVED[module]}:{name}") is not None


def test_a_room_is_found_by_the_name_of_the_module_it_was() -> None:
    from drumline.model import GPT

    assert load_plugin("drumline.model:GPT") is GPT


def test_a_config_that_names_a_moved_module_trains(capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(Path("runs/modern"))
    folder.config.write_text(folder.config.read_text().replace('"gpt"', '"drumline.fused_gpt:FusedGPT"'))
    assert run_command(["train", "--run_dir", "runs/modern", "--allow_change", "model"]) == 0
    assert folder.read_status()["state"] == "finished"
