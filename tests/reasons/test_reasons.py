"""What only a run that is a pure function can tell: which text, which bits, which tensor."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.small import small
from helpers.stories import WORDS
from helpers.warm import Warm

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder
from drumline.train import assembly

STEPS, BAD = 24, "15-bad.txt"
FLAGS = small(
    *"--n_layers 2 --context 32 --vocab_size 320 --lr 0.01 --save_every 6 --keep_checkpoints 9 --bitwise".split(),
    *f"--global_batch_size 8 --total_steps {STEPS} --train_data_path text --data_dir data --eval_windows 1".split(),
    *"--seed 3 --valid_fraction 0.05".split(),
)
MODELS = """
from drumline.model import GPT

def plain(config):
    return GPT(config)

def changed(config):
    model = GPT(config)
    model.blocks[1].feed_forward.up.register_forward_hook(lambda module, inputs, output: output * 1.001)
    return model
"""


def train(name: str, *flags: str) -> int:
    return run_command(["train", *FLAGS, "--run_dir", f"runs/{name}", *flags])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stories with one document of random characters, and a run that has trained on them."""
    folder = tmp_path_factory.mktemp("reasons")
    (folder / "text").mkdir()
    draw = random.Random(1)
    for number in range(30):
        words = " ".join(draw.choice(WORDS) for _ in range(110))
        (folder / "text" / f"{number:02d}.txt").write_text(f"Story {number}. {words}.")
    (folder / "text" / BAD).write_text("".join(chr(draw.randrange(33, 127)) for _ in range(400)))
    (folder / "my_models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("a") == 0
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def records(name: str) -> dict[int, dict[str, Any]]:
    lines = Path("runs", name, "metrics.jsonl").read_text().splitlines()
    return {each["step"]: each for each in map(json.loads, lines) if "loss" in each}


@pytest.fixture
def copy(here: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], str]:
    """A copy of the run with records that were changed."""

    def make(change: Callable[[dict[str, Any]], None]) -> str:
        run = tmp_path / "copy"
        shutil.copytree("runs/a", run)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            change(line)
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(run)

    return make


def files(run: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}


def bad_step() -> int:
    """The last step that trained on the bad document, as `blame` tells without a log."""
    from drumline.reasons import batches_of, blame, open_run

    run = open_run(Path("runs/a"), trusts=False)
    data, batches = batches_of(run)
    steps = [n for n in range(1, STEPS + 1) if BAD in str(blame(run, data.train, batches, step=n))]
    return steps[-1]


def test_a_spike_is_traced_to_the_one_bad_document_and_a_new_run_never_visits_it(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, before = bad_step(), files("runs/a")
    words = ["blame", "runs/a", "--step", str(step)]
    assert run_command([*words, "--losses", "--decode", "--exclude", "1", "-o", "skip.json"]) == 0
    out = capsys.readouterr().out
    assert f"loss {records('a')[step]['loss']:.4f} computed again, {records('a')[step]['loss']:.4f} recorded" in out
    first = next(line for line in out.splitlines() if line.startswith("   1 "))
    assert BAD in first
    assert files("runs/a") == before
    assert train("left-out", "--skip_list", "skip.json") == 0
    monkeypatch.setattr(subprocess, "Popen", Warm)
    ranks = subprocess.run(
        [
            sys.executable,
            "-m",
            "drumline",
            "train",
            *FLAGS,
            "--run_dir",
            "runs/left-out-2",
            "--skip_list",
            "skip.json",
            "--nproc",
            "2",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ranks.returncode == 0, ranks.stdout + ranks.stderr
    one, two = (RunFolder(Path("runs", name)).read_status() for name in ("left-out", "left-out-2"))
    assert one["weights_sha256"] == two["weights_sha256"] != RunFolder(Path("runs/a")).read_status()["weights_sha256"]
    capsys.readouterr()
    for number in range(1, STEPS + 1):
        assert run_command(["blame", "runs/left-out", "--step", str(number)]) == 0
    assert BAD not in capsys.readouterr().out
    # The list is part of what the run is.
    assert train("left-out", "--skip_list", "other.json") == 1
    assert "skip_list skip.json -> other.json" in capsys.readouterr().err
    content = json.loads(Path("skip.json").read_text())
    content["documents"][0]["stop"] += 40
    Path("skip.json").write_text(json.dumps(content))
    assert train("left-out", "--skip_list", "skip.json") == 1
    assert "skip_list" in capsys.readouterr().err
    content["tokens_sha256"] = "0" * 64
    Path("skip.json").write_text(json.dumps(content))
    assert train("other", "--skip_list", "skip.json") == 1
    err = capsys.readouterr().err
    assert "0" * 64 in err and json.loads(Path("runs/a/data.json").read_text())["sha256"] in err


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bitwise_run_that_is_computed_again_has_the_same_bits(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Warm)
    before = files("runs/a")
    assert run_command(["replay", "runs/a", "--step", "10", "--ranks", str(ranks)]) == 0
    out = capsys.readouterr().out
    assert "steps 7 to 10 of runs/a: same bits (4 records compared" in out
    assert files("runs/a") == before


def test_a_record_that_was_changed_is_named(copy: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    def change(record: dict[str, Any]) -> None:
        if record["step"] == 8 and "loss" in record:
            record["loss"] *= 1.01

    assert run_command(["replay", copy(change), "--step", "10"]) == 3
    out = capsys.readouterr().out
    assert "different" in out and "the record of step 8 was changed" in out


def test_a_version_that_changed_is_named_and_the_first_tensor(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(assembly, "versions", lambda: {"python": "3.0", "torch": "1.0.0"})
        real = assembly.Loop._record

        def record(loop: Any, step: int, *more: Any) -> Any:
            weight = loop.setup.step.model.get_parameter("token_embedding.weight")
            if step == 2:  # as if a kernel had rounded otherwise
                weight.data[3] *= 1.5
            return real(loop, step, *more)

        other.setattr(assembly.Loop, "_record", record)
        assert train("old", "--total_steps", "4", "--save_every", "2") == 0
    capsys.readouterr()
    assert run_command(["replay", "runs/old", "--step", "2"]) == 1
    assert "no valid checkpoint before step 2" in capsys.readouterr().err
    assert run_command(["replay", "runs/old", "--step", "2", "--from_start"]) == 3
    out = capsys.readouterr().out
    assert "changed since: python 3.0 -> " in out and "torch 1.0.0 -> " in out
    assert "at step 2 1 of " in out and "first token_embedding.weight" in out


def test_old_records_without_a_fingerprint_are_compared_by_their_numbers(
    copy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(lambda record: record.pop("fingerprint", None))
    assert run_command(["replay", run, "--step", "8"]) == 0
    assert "same numbers (2 records compared" in capsys.readouterr().out
    assert run_command(["diff", run, "runs/a"]) == 0
    assert f"the same in all {STEPS} steps" in capsys.readouterr().out


def test_every_record_has_the_fingerprint_of_the_weights_after_its_step(here: Path) -> None:
    from drumline.checkpoint import newest_readable, weights_fingerprint
    from drumline.generate import load_run

    assert newest_readable(Path("runs/a/checkpoints"))[0] is not None
    assert records("a")[STEPS]["fingerprint"] == weights_fingerprint(load_run(Path("runs/a")).model)
    assert len({each["fingerprint"] for each in records("a").values()}) == STEPS


def test_a_run_with_a_changed_kernel_is_traced_to_its_layer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("--total_steps", "6", "--log_every", "3")
    assert train("plain", "--model", "my_models:plain", *short) == 0
    assert train("changed", "--model", "my_models:changed", *short) == 0
    capsys.readouterr()
    assert run_command(["diff", "runs/plain", "runs/changed"]) == 0
    out = capsys.readouterr().out
    assert "setting model: my_models:plain / my_models:changed" in out
    assert "first tensor that differs: activation: output of blocks.1.feed_forward.up" in out
    assert "the same in both: input of blocks.1.feed_forward.up" in out
    assert "again: " not in out.replace("computed again", ""), "both give their own records again"


def test_after_rollbacks_a_step_has_the_data_that_it_ended_up_with(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from drumline.reasons import batches_of, blame, open_run, with_rollbacks

    code = train("back", "--spike_factor", "1.05", "--save_every", "4", "--max_rollbacks", "9", "--total_steps", "40")
    assert code in (0, 3)
    run = open_run(Path("runs/back"), trusts=False)
    assert run.detours, "the loss of this run leaps"
    since = run.detours[0][0] + 1
    data, batches = batches_of(run)
    then, now = (
        blame(each, data.train, batches, step=since) for each in (with_rollbacks(run, 0), with_rollbacks(run, 1))
    )
    assert then != now
    capsys.readouterr()
    back_to = run.detours[-1][0]  # its checkpoint was saved before the rollback, and does not know of it
    for step in (back_to + 1, max(records("back"))):
        assert run_command(["replay", "runs/back", "--step", str(step)]) == 0
        assert "same bits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("blame runs/a --step 0", "has no step 0: its steps are 1 to 24"),
        ("blame runs/a --step 25", "has no step 25"),
        ("replay runs/a --step 3", "no valid checkpoint before step 3 (steps saved: 6, 12, 18, 24)"),
        ("blame runs/a --step 3 --losses", "no valid checkpoint before step 3"),
        ("replay runs/a --step 8 --ranks 3", "3 ranks cannot share a step of 2 micro-batches"),
        ("replay runs/a --step 8 --ranks 0", "--ranks is 0"),
        ("blame runs/none --step 3", "runs/none is not a run"),
        ("blame runs/a --step 3 --exclude 99", "this step has no document '99'"),
        ("blame runs/a --step 3 --rollbacks 1", "has 0 rollbacks, not 1"),
        ("blame runs/script --step 3", "was trained by a script with Trainer"),
        ("diff runs/a runs/script", "was trained by a script with Trainer"),
    ],
)
def test_what_cannot_be_told_is_said_with_a_fix(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, problem: str
) -> None:
    Path("runs/script").mkdir(exist_ok=True)
    Path("runs/script/trainer.json").write_text("{}")
    assert run_command(words.split()) == 1
    err = capsys.readouterr().err
    assert problem in err and "fix: " in err and len(err.strip().splitlines()) == 2


def test_on_other_numbers_of_ranks_a_run_that_is_not_bitwise_is_the_same_within_rounding(
    copy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(record: dict[str, Any]) -> None:
        if "loss" in record:
            record.update(loss=record["loss"] * 1.0001, fingerprint="0" * 16)

    run = Path(copy(change))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("bitwise = true", "bitwise = false"))
    assert run_command(["replay", str(run), "--step", "8"]) == 0
    out = capsys.readouterr().out
    assert "within rounding" in out and "losses within 0.001 and gradient norms within 0.01" in out


def test_a_run_whose_data_are_gone_says_so(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree("runs/a", tmp_path / "runs/a")
    data = json.loads((tmp_path / "runs/a/data.json").read_text())
    (tmp_path / "runs/a/data.json").write_text(json.dumps({**data, "train": "/gone/train.bin", "cwd": "/gone"}))
    monkeypatch.chdir(tmp_path)
    assert run_command(["blame", "runs/a", "--step", "3"]) == 1
    assert "neither the tokens of runs/a" in capsys.readouterr().err
