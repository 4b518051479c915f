"""The command line: quick, forgiving about dashes, and mistakes are two lines with a fix."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.small import small

import drumline
from drumline.cli.app import parser, run_command
from drumline.cli.overview import COMMANDS
from drumline.config.toml_file import sections
from drumline.errors import EXIT_USAGE, EXIT_USER
from drumline.files.run_folder import RunFolder
from drumline.report.runs import list_runs

Train = Callable[..., int]


HELP = """
import sys
from drumline.cli.app import run_command
code = run_command(["--help"])
print("\\nMODULES", *sys.modules)
sys.exit(code)
"""


def test_help_imports_nothing_slow() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    answer, _, modules = done.stdout.rpartition("\nMODULES ")
    for command in ("prepare", "train", "evaluate", "sample", "runs"):
        assert command in answer
    loaded = modules.split()
    assert not {"torch", "numpy", "matplotlib", "tokenizers"} & set(loaded)
    assert len(loaded) < 700 and len([name for name in loaded if name.startswith("drumline.")]) < 40, len(loaded)


def test_help_explains_every_setting_in_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    for command in (
        parser("train"),
        parser("train")["train"],
    ):  # a console that an earlier error made keeps the width of that time
        monkeypatch.setattr(command, "_fallback_console", None)
    run_command(["train", "--help"])
    shown = capsys.readouterr().out
    for section in sections().values():
        for name in section:
            assert f"--{name} " in shown, name
    groups = re.findall(r"─ (\w+) ─", shown)
    assert groups == ["Parameters", "Model", "Data", "Batch", "Optimizer", "Run", "Ranks", "Records"]


@pytest.mark.parametrize("name", [place.rpartition(":")[2].rstrip("_") for place in COMMANDS])
def test_every_command_has_a_page_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([name, "--help"]) == 0
    usage, _, page = capsys.readouterr().out.partition("\n\n")
    assert f"drumline {name}" in usage and len(page.splitlines()) > 3


@pytest.mark.parametrize(
    "flags",
    [["--gradient_accumulation_steps", "3"], ["--gradient-accumulation_steps=3"], ["--gradient-accumulation-steps=3"]],
)
def test_dashes_and_underscores_are_alike(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "--dry_run", "--batch_size", "2", *flags]) == 0
    assert "2 sequences x 3 micro-batches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--batch_size", "3", "--batch_size", "5"], "batch_size = 5"),
        (["--batch_size=3", "--batch-size", "5"], "batch_size = 5"),
        (["--batch-size", "3", "--batch_size=5"], "batch_size = 5"),
        (["--smear", "--no-smear"], "smear = false"),
        (["--no-smear", "--smear"], "smear = true"),
        (["--compile", "--compile"], "compile = true"),
        (["--preset", "gpt2", "--preset", "tiny"], 'preset = "tiny"'),
        (["--allow_change", "lr", "--allow-change=seed"], 'allow_change = ["lr", "seed"]'),
        (["--config", "absent.toml", "--config", "run.toml"], "n_layers = 3"),
        (["--config", "run.toml", "--epochs", "2"], "epochs = 2.0"),
    ],
)
def test_of_a_flag_given_twice_the_last_one_counts(
    flags: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("n_layers = 3\ntotal_steps = 7\n")
    assert run_command(["train", "--dry_run", *flags]) == 0
    assert shown in capsys.readouterr().out.splitlines()


def test_other_commands_take_the_last_flag_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["sample", str(tmp_path / "no"), "--temperature", "-1", "--temperature=-2"]) == EXIT_USER
    assert "temperature -2.0" in capsys.readouterr().err.replace("temperature is", "temperature")
    assert run_command(["launch", "--ssh", "sh", "--hosts", "a", "--hosts", "b,c", "--dry_run", "--", "bench"]) == 0
    shown = capsys.readouterr().out
    assert "b" in shown and "a:" not in shown


def test_flags_override_the_config_file_which_overrides_the_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('preset = "modern-tiny"\n[model]\nn_layers = 3\n[optim]\nlr = 0.5\n')
    assert run_command(["train", "--config", "run.toml", "--lr", "0.25", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "n_layers = 3" in shown and "lr = 0.25" in shown and 'positions = "rope"' in shown


def test_dry_run_shows_what_would_happen_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["train", "--dry_run", "--preset", "gpt2", "--gradient_accumulation_steps", "4"]) == 0
    said = capsys.readouterr()
    shown = said.err
    assert tomllib.loads(said.out)["batch"]["gradient_accumulation_steps"] == 4
    assert "parameters       124,475,904" in shown  # GPT-2's, with the vocabulary rounded up to 50,304
    assert "8 sequences x 4 micro-batches x 1024 = 32,768 tokens" in shown
    assert re.search(r"memory +about \d+\.\d\d GB", shown) and "1 epoch; the number of steps is known once" in shown
    assert "snapshots " not in shown  # a process without a supervisor takes none
    assert list(tmp_path.iterdir()) == []


def test_what_a_dry_run_prints_is_a_config_that_works(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--dry_run") == 0
    Path("x.toml").write_text(capsys.readouterr().out)
    assert run_command(["train", "--config", "x.toml"]) == 0
    assert train("--run_dir", "flags") == 0
    weights = [RunFolder(Path(run)).read_status()["weights_sha256"] for run in ("runs/modern-tiny", "flags")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["train", "--bach_size", "3"], EXIT_USAGE, "Did you mean --batch_size?"),
        (["trian"], EXIT_USAGE, "train"),
        (["train", "--lr", "fast"], EXIT_USAGE, "fast"),
        (["train", "--device", "tpu"], EXIT_USAGE, "tpu"),
        (["train", "--config", "absent.toml"], EXIT_USER, "absent.toml"),
        (["train", "--config", "bad.toml"], EXIT_USAGE, "did you mean lr?"),
        (["train", "--preset", "gpt3"], EXIT_USAGE, "gpt2"),
        (["train", "--train_data_path", "nowhere.txt"], EXIT_USER, "nowhere.txt"),
        (["train", "--train_data_path", "nowhere.bin"], EXIT_USER, "nowhere.bin"),
        (["train", "--n_heads", "5"], EXIT_USER, "5 heads"),
        (["train", "--lr", "-1"], EXIT_USER, "lr is -1.0"),
        (["train", "--batch_size", "0"], EXIT_USER, "batch_size is 0"),
        (["train", "--total_steps", "0"], EXIT_USER, "total_steps"),
        (["train", "--save_every", "-3"], EXIT_USER, "save_every"),
        (["train", "--log_every", "0"], EXIT_USER, "log_every"),
        (["train", "--device", "mps"], EXIT_USER, "no mps device"),
        (["train", "--resume_from", "nowhere"], EXIT_USER, "nowhere"),
        (["train", "--allow_change", "learning_rate"], EXIT_USER, "learning_rate"),
        (["evaluate", "nowhere"], EXIT_USER, "nowhere"),
        (["sample", "nowhere"], EXIT_USER, "nowhere"),
        (["sample", "nowhere", "--temperature", "-1"], EXIT_USER, "temperature"),
        (["prepare", "nowhere.txt", "--out", "out"], EXIT_USER, "nowhere.txt"),
        (["prepare", "text"], EXIT_USAGE, "out"),
    ],
)
def test_a_mistake_is_two_lines_with_a_fix(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("lrr = 1\n")
    if argv[0] == "train" and "--train_data_path" not in argv:
        argv = [*argv, "--train_data_path", "text", "--vocab_size", "300"]
    assert run_command(argv) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("  fix: ")
    assert says in "".join(lines)
    assert list(list_runs(Path("runs"))) == []


def test_evaluate_and_sample_use_the_newest_checkpoint(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--run_dir", "run", "--save_every", "3") == 0
    capsys.readouterr()
    assert run_command(["evaluate", "run"]) == 0
    shown = capsys.readouterr().out
    assert "at step 6" in shown and "bits per byte" in shown
    assert run_command(["evaluate", "run/checkpoints/step-00000003", "--split", "train", "--batch_size", "3"]) == 0
    assert "at step 3" in capsys.readouterr().out
    (prepared,) = Path("data").iterdir()
    assert run_command(["evaluate", "run", "--data", str(prepared / "valid.bin")]) == 0
    assert capsys.readouterr().out == shown
    texts = []
    for seed in ("1", "1", "2"):
        hot = ["--temperature", "5"]  # the text is so simple that a cooler model always goes on alike
        assert run_command(["sample", "run", "--prompt", "All work", "--seed", seed, "--max_tokens", "20", *hot]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("All work")
    greedy = ["--temperature", "0", "--top_k", "5", "--top_p", "0.9", "--max_tokens", "5", "--device", "cpu"]
    assert run_command(["sample", "run", *greedy]) == 0


def test_evaluate_and_sample_tell_of_a_damaged_checkpoint_and_change_nothing(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--run_dir", "run", "--save_every", "2", "--keep_checkpoints", "9") == 0
    os.truncate("run/checkpoints/step-00000006/run.json", 9)
    Path("run/checkpoints/step-00000004").rename("run/checkpoints/step-00000004.damaged")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for words in (["evaluate", "run"], ["sample", "run", "--max_tokens", "3"]):
        capsys.readouterr()
        assert run_command(words) == 0
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith(
            "warning: the checkpoint run/checkpoints/step-00000006 is damaged: run.json has 9 bytes"
        )
        assert first.endswith("; using step-00000002 instead")
        assert "step-00000004.damaged was set aside as damaged; using step-00000002 instead" in second
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    shutil.rmtree("run/checkpoints/step-00000002")
    assert run_command(["sample", "run"]) == 1
    error = capsys.readouterr().err
    assert "has no valid checkpoint" in error and "run.json has 9 bytes" in error


def test_runs_fits_a_terminal_of_80_columns_in_natural_order_with_the_step_it_stopped_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["tiny", "tiny-2", "tiny-10", "a-name-that-is-much-longer-than-others"]
    for name in names:
        folder = RunFolder(Path("runs", name))
        folder.path.mkdir(parents=True)
        folder.config.write_text("")
        record = {"step": 1_230_000, "loss": 10.1234, "valid_loss": 11.1234, "bits_per_byte": 3.1234}
        folder.metrics.write_text(json.dumps(record) + "\n")
        folder.write_status("stopped", step=1_234_567, total_steps=2_000_000)
    assert run_command(["runs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == [f"runs/{name}" for name in [names[3], *names[:3]]]
    assert {row["step"] for row in rows} == {1_234_567} and {row["valid_loss"] for row in rows} == {11.1234}
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(["runs"]) == 0
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("1,234,567/2,000,000  10.1234  11.1234     3.1234") == 4 and "…" not in shown


def test_runs_lists_each_run_with_its_state_and_last_loss(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs"]) == 0
    assert "no runs in runs" in capsys.readouterr().out
    assert train() == 0
    assert (
        train(
            "--recipe", "classic", "--lr", "1e30", "--max_nonfinite", "1", "--grad_clip", "0", "--run_dir", "runs/bad"
        )
        == 3
    )
    status = json.loads(Path("runs/modern-tiny/status.json").read_text())
    Path("runs/gone").mkdir()
    Path("runs/gone/config.toml").write_text("")
    Path("runs/gone/status.json").write_text(json.dumps({**status, "state": "running", "pid": 2**22 + 1}))
    capsys.readouterr()
    assert run_command(["runs"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.startswith("runs/")}
    assert rows["runs/modern-tiny"][:2] == ["finished", "6/6"] and float(rows["runs/modern-tiny"][2]) > 0
    assert rows["runs/bad"][0] == "failed" and rows["runs/gone"][0] == "lost"
    assert "runs/bad: step" in shown and "not finite" not in rows["runs/bad"]


def test_prepare_writes_what_train_reads(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text / "bad.txt").write_bytes(b"caf\xe9 \xff")
    command = ["prepare", "text", "--out", "tokens", "--vocab_size", "300"]
    assert run_command(command) == EXIT_USER
    assert "bad.txt" in capsys.readouterr().err and not Path("tokens").exists()
    assert run_command([*command, "--on_error", "skip"]) == 0
    shown = capsys.readouterr().out
    assert "skipped 1 unreadable" in shown and "drumline train --train_data_path tokens" in shown
    assert run_command(["train", *small("--train_data_path", "tokens", "--run_dir", "run")]) == 0


@pytest.mark.parametrize("ranks", [(), ("--nproc", "2")], ids=["alone", "two ranks"])
def test_a_run_started_without_standard_streams_trains_and_keeps_its_files_apart(
    text: Path, tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    flags = small("--train_data_path", str(text), "--run_dir", str(tmp_path / "run"), *ranks)
    command = shlex.join([sys.executable, "-m", "drumline", "train", *flags])
    done = subprocess.run(["bash", "-c", f"exec {command} <&- >&- 2>&-"], check=False, timeout=120)
    folder = RunFolder(tmp_path / "run")
    assert done.returncode == 0 and folder.read_status()["state"] == "finished"
    assert "finished: " in folder.log.read_text()


def test_model_options_reach_a_model_of_your_own_are_kept_and_may_not_change(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("nets_of_mine.py").write_text(
        "from drumline import GPT\n\n\ndef net(shape, *, width=1, tag):\n    assert (width, tag) == (3, 'a b')\n"
        "    return GPT(shape)\n"
    )
    monkeypatch.syspath_prepend(str(Path.cwd()))
    mine = ("--run_dir", "mine", "--model", "nets_of_mine:net", "--model_options", "width=3")
    assert train(*mine) == EXIT_USER
    assert "nets_of_mine:net requires tag" in capsys.readouterr().err
    assert train(*mine, "--model-options=tag=a b", "--model_options", "with=3") == EXIT_USER
    assert "has no option with\n  fix: did you mean width? its options: width, tag" in capsys.readouterr().err
    assert train(*mine, "--model-options=tag=a b") == 0
    assert run_command(["train", "--run_dir", "mine"]) == 0
    assert '[model_options]\ntag = "a b"\nwidth = 3\n' in Path("mine/config.toml").read_text()
    capsys.readouterr()
    assert run_command(["train", "--run_dir", "mine", "--model_options", "tag=b"]) == EXIT_USER
    assert "was started with different settings: model_options" in capsys.readouterr().err
    assert run_command(["train", "--model_options", "width=3"]) == EXIT_USER
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "not for --model gpt" in lines[0]


SETTINGS = ["config/settings.py", "config/model.py", "bench/config.py", "launch/slurm.py", "launch/kubernetes.py"]


@pytest.mark.parametrize("path", SETTINGS)
def test_the_help_of_a_setting_is_one_line_which_the_help_page_can_wrap(path: str) -> None:
    tree = ast.parse((Path(drumline.__file__).parent / path).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bodies = [node for each in classes for node in each.body[1:] if isinstance(node, ast.Expr)]
    texts = [str(node.value.value) for node in bodies if isinstance(node.value, ast.Constant)]
    assert texts and not [text for text in texts if "\n" in text]


@pytest.mark.parametrize("path", sorted((Path(drumline.__file__).parent / "cli").glob("*.py")), ids=lambda p: p.name)
def test_the_help_of_a_flag_is_one_line_which_the_help_page_can_wrap(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and "Parameters\n---" in (text := ast.get_docstring(node) or ""):
            about, _, listed = text.partition("----------\n")
            assert all(len(line) <= 80 for line in about.splitlines()[1:]), node.name
            lines = listed.splitlines()
            assert [line.startswith("    ") for line in lines] == [False, True] * (len(lines) // 2), node.name


def test_a_dry_run_of_minutes_says_how_steps_are_chosen_and_prints_a_config_that_works(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--dry_run", "--minutes", "2") == 0
    said = capsys.readouterr()
    assert "as many as fit in 2 minutes, chosen from the speed of the first steps" in said.err
    Path("x.toml").write_text(said.out)
    monkeypatch.setattr("drumline.train.length._measured", lambda *measured: (3, 4))
    assert run_command(["train", "--config", "x.toml", "--run_dir", "run"]) == 0
    assert RunFolder(Path("run")).read_status()["step"] == 3


def test_a_dry_run_counts_the_tokens_of_all_ranks(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--dry_run", "--nproc", "3", "--gradient_accumulation_steps", "2") == 0
    assert "4 sequences x 6 micro-batches x 16 = 384 tokens, on 3 ranks" in capsys.readouterr().err
    assert train("--dry_run", "--nproc", "2", "--nnodes", "2") == 0
    assert "4 sequences x 4 micro-batches x 16 = 256 tokens, on 4 ranks" in capsys.readouterr().err
    assert train("--dry_run", "--nproc", "3", "--global_batch_size", "8") == EXIT_USER
    assert "3 ranks cannot share a step of 2 micro-batches" in capsys.readouterr().err
    assert train("--dry_run") == 0
    assert "4 sequences x 1 micro-batch x 16 = 64 tokens\n" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--train_data_path", "--valid_data_path"])
@pytest.mark.parametrize("path", ["nosuch.txt", "nosuch/*.txt"])
def test_a_dry_run_refuses_data_that_do_not_exist_as_the_run_would(
    train: Train, capsys: pytest.CaptureFixture[str], flag: str, path: str
) -> None:
    refused = []
    for more in ([], ["--dry_run"]):
        refused.append((train(flag, path, *more), capsys.readouterr().err))
    assert refused[0] == refused[1] and refused[0][0] == EXIT_USER
    assert "nosuch" in refused[0][1] and "fix: " in refused[0][1]
