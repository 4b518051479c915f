"""The drill: every kind of fault on a real run, and a verdict that can be no."""

import json
from pathlib import Path

import pytest
from helpers.warm import Warm

from drumline.cli.app import run_command
from drumline.drill.drill import DrillConfig, DrillReport, conclusion, fault_rows, parse_faults, run_drill, schedule
from drumline.drill.faults import FAULTS, Outcome
from drumline.errors import EXIT_FAILED


def test_a_seed_always_breaks_the_same_things_and_every_kind_has_its_turn(tmp_path: Path) -> None:
    config = DrillConfig(folder=tmp_path, minutes=10.0, seed=4)
    plan = schedule(config)
    assert plan == schedule(config) != schedule(DrillConfig(folder=tmp_path, minutes=10.0, seed=5))
    assert {fault for _, fault in plan} == set(FAULTS) and len(plan) >= 30
    assert [at_s for at_s, _ in plan] == sorted(at_s for at_s, _ in plan) and plan[-1][0] < 600


@pytest.mark.needs_shm
@pytest.mark.long
def test_all_kinds_of_faults_in_one_drill_cost_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("subprocess.Popen", Warm)
    monkeypatch.setattr("drumline.drill.drill._STEPS_PER_FAULT", 30)
    folder = tmp_path / "drill"
    assert run_command(["drill", "--minutes", "0.2", "--seed", "1", "--folder", str(folder)]) == 0
    said = capsys.readouterr().out
    report = json.loads((folder / "drill.json").read_text())
    assert report["held"] and report["weights_sha256"] == report["undisturbed_sha256"]
    assert {outcome["fault"] for outcome in report["outcomes"]} == set(FAULTS)
    assert "final weights equal to the reference run's" in said and said.endswith("passed: no work was lost\n")


@pytest.mark.needs_shm
@pytest.mark.long
def test_a_sharded_run_withstands_a_drill_with_the_weights_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("subprocess.Popen", Warm)
    monkeypatch.setattr("drumline.drill.drill._STEPS_PER_FAULT", 30)
    words = f"drill --shard full --faults kill,stop,corrupt,nan --minutes 0.1 --seed 1 --folder {tmp_path / 'drill'}"
    assert run_command(words.split()) == 0
    report = json.loads((tmp_path / "drill/drill.json").read_text())
    assert report["held"] and report["weights_sha256"] == report["undisturbed_sha256"]
    config = (tmp_path / "drill/disturbed/config.toml").read_text()
    assert 'shard = "full"' in config and len(report["outcomes"]) == 4


@pytest.mark.parametrize(
    "harm",
    [{"weights_sha256": "b"}, {"named": False}, {"noticed_s": None}, {"again_s": None}, {"lost_steps": None}],
    ids=str,
)
def test_a_drill_does_not_hold_if_anything_did_not(harm: dict[str, object]) -> None:
    outcome = Outcome("kill", at_step=7, noticed_s=0.1, again_s=0.5, lost_steps=2, named=True)
    report = DrillReport([outcome], 100, wall_s=20.0, step_s=0.1, weights_sha256="a", undisturbed_sha256="a")
    assert report.passed and report.goodput == 0.5 and conclusion(report)[-1] == "passed: no work was lost"
    for name, value in harm.items():
        setattr(report if hasattr(report, name) else outcome, name, value)
    assert not report.passed and conclusion(report)[-1] == "FAILED"
    assert len(fault_rows(report)) == 1


def test_a_drill_that_did_not_hold_exits_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.drill.run_drill", lambda config, say: DrillReport())
    assert run_command(["drill", "--folder", str(tmp_path / "drill")]) == EXIT_FAILED


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--faults", "kill,flood"], "'flood' is not a fault"),
        (["--ranks", "1"], "1 rank"),
        (["--ranks", "3", "--shard", "full"], "cannot divide its 4 micro-batches among 3 ranks"),
        (["--minutes", "0"], "0 minutes"),
        (["--folder", "/dev/null/drill"], "/dev/null/drill cannot be made (Not a directory)"),
    ],
)
def test_mistakes_are_told_in_two_lines(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["drill", *flags]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[0] and lines[1].startswith("  fix: ") and len(lines) == 2


def test_a_drill_never_deletes_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("weights")
    with pytest.raises(Exception, match="is not a drill folder"):
        run_drill(DrillConfig(folder=tmp_path), say=print)
    assert (tmp_path / "precious").exists()
    assert parse_faults("nan,kill") == ("kill", "nan")
