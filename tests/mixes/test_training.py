"""Runs on a mix: the same bits on any ranks, resumed anywhere; the losses of each source; what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import train_ranks
from helpers.small import small
from helpers.stories import WORDS

from drumline.cli.app import run_command
from drumline.files.run_folder import RunFolder

STEPS = 12
FLAGS = small(*f"--batch_size 2 --global_batch_size 10 --total_steps {STEPS} --eval_every 6 --seed 4".split())
MIX = ("--train_data_path", "books:0.6,code:0.4")
BITWISE = ("--bitwise", "--schedule", "constant", "--warmup_steps", "2")
MODELS = """
from torch import nn
from torch.nn import functional as F

class Plain(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table, self.head = nn.Embedding(config.vocab_size, 8), nn.Linear(8, config.vocab_size)

    def forward(self, ids, targets=None):
        logits = self.head(self.table(ids))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """books and code with one tokenizer, other with another one, chats."""
    folder = tmp_path_factory.mktemp("mixes")
    draw = random.Random(7)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, words in (("books", WORDS), ("code", [word[::-1] for word in WORDS])):
            Path(f"{name}-text").mkdir()
            for number in range(24):
                text = " ".join(draw.choice(words) for _ in range(120))
                Path(f"{name}-text", f"{name}{number:02d}.txt").write_text(f"{name} {number}: {text}")
        row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c d"}]}
        Path("chats.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
        for words in (
            "books-text --out books --vocab_size 300",
            "code-text --out code --tokenizer books/tokenizer.json",
            "code-text --out other --vocab_size 280",
            "books-text --out whole --tokenizer books/tokenizer.json --valid_fraction 0",
            "chats.jsonl --out chats --format chat --tokenizer books/tokenizer.json",
        ):
            assert run_command(["prepare", *words.split()]) == 0, words
        Path("mixed_models.py").write_text(MODELS)
    return folder


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, with the prepared ones."""
    for each in prepared.iterdir():
        (tmp_path / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(run: str, *flags: str) -> int:
    return run_command(["train", *FLAGS, *MIX, "--run_dir", run, *flags])


def records(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def losses(run: str) -> list[dict[str, float]]:
    return [{key: r[key] for key in r if key.split("/")[0] == "loss"} for r in records(run) if "loss" in r]


def sha256(run: str) -> str:
    status = RunFolder(Path(run)).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def test_a_mix_gives_the_same_bits_on_1_and_2_ranks_and_resumed_on_the_other_number(here: Path) -> None:
    assert train("one", *BITWISE) == 0
    for outcome in train_ranks(2, *FLAGS, *MIX, *BITWISE, "--run_dir", "two"):
        assert outcome.code == 0, outcome.err
    for size, stop in ((2, 5), (1, 8), (2, STEPS)):
        flags = ["--total_steps", str(stop), "--allow_change", "total_steps"]
        for outcome in train_ranks(size, *FLAGS, *MIX, *BITWISE, "--run_dir", "parts", *flags):
            assert outcome.code == 0, outcome.err
    assert sha256("one") == sha256("two") == sha256("parts")
    assert losses("one") == losses("two") == losses("parts")


def test_the_losses_of_sources_make_up_the_loss_of_the_step(here: Path) -> None:
    classic = ("--recipe", "classic")  # Muon makes roundings large
    assert train("plain", *classic) == 0
    for outcome in train_ranks(2, *FLAGS, *MIX, *classic, "--run_dir", "ddp"):
        assert outcome.code == 0, outcome.err
    shares = [0.0, 0.0]
    for plain, ddp in zip(losses("plain"), losses("ddp"), strict=True):
        assert ddp == pytest.approx(plain, rel=2e-3)
        if len(plain) == 3:
            books, code = plain["loss/books"], plain["loss/code"]
            share = (plain["loss"] - code) / (books - code)  # of the ten sequences of the step
            assert share * 10 == pytest.approx(round(share * 10), abs=0.02)
            shares = [shares[0] + share, shares[1] + 1]
    assert shares[1] > STEPS / 2 and shares[0] / shares[1] == pytest.approx(0.6, abs=0.2)


def test_validation_is_per_source_and_their_mean_has_the_weights_of_the_run(here: Path) -> None:
    assert train("run", "--global_batch_size", "1000", "--batch_size", "100", "--total_steps", "1") == 0
    (found,) = [record for record in records("run") if "valid_loss" in record]
    for key in ("valid_loss", "bits_per_byte"):
        assert found[key] == pytest.approx(0.6 * found[f"{key}/books"] + 0.4 * found[f"{key}/code"])


def test_the_weights_of_a_stage_hold_from_its_step_to_its_last(here: Path) -> None:
    stages = ("--stages", "3-6 code:1", "--stages", "75%- books:1")
    assert train("run", *stages) == 0
    for number, step in enumerate(losses("run"), 1):
        if 3 < number <= 6:
            assert step.keys() == {"loss", "loss/code"}, number
        elif number > 9:
            assert step.keys() == {"loss", "loss/books"}, number
    assert any(len(step) == 3 for step in losses("run")[:3]) and any(len(step) == 3 for step in losses("run")[6:9])
    assert train("run", "--stages", "3-6 books:1") == 1


def test_a_run_of_amounts_is_as_long_as_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [each for each in small("--global_batch_size", "10", "--batch_size", "2") if each != "--total_steps"]
    flags.remove("6")
    words = ["--train_data_path", "books:2epochs,code:8ktokens", "--run_dir", "run"]
    assert run_command(["train", *flags, *words]) == 0
    assert run_command(["data", "show", "run", "--json"]) == 0
    about = json.loads(capsys.readouterr().out.split("\n{\n", 1)[1].join(["{", ""]))
    books, code = about["sources"]
    assert books["epochs"] == pytest.approx(2.0, abs=0.03) and code["seen"] == pytest.approx(8000, rel=0.03)
    assert books["left_in_run"] == code["left_in_run"] == 0


def test_data_show_tells_what_was_seen_and_is_left(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run") == 0
    capsys.readouterr()
    assert run_command(["data", "show", "run", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["step"], about["total_steps"]) == (STEPS, STEPS)
    seen = {row["source"]: row["seen"] for row in about["sources"]}
    assert sum(seen.values()) == STEPS * 10 * 16 and 0.4 < seen["books"] / sum(seen.values()) < 0.8
    newest = [step for step in losses("run") if "loss/books" in step][-1]
    assert about["sources"][0]["loss"] == newest["loss/books"]
    for what, words in (("run", ["books", "60.0%"]), ("books", ["train", "tokenizer sha256"])):
        assert run_command(["data", "show", what]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)
    assert run_command(["train", *FLAGS, "--train_data_path", "books", "--run_dir", "plain"]) == 0
    capsys.readouterr()
    assert run_command(["data", "show", "plain", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["sources"]
    assert row["source"] == "books" and row["seen"] == STEPS * 10 * 16 and row["weight"] == 1.0
    assert run_command(["data", "show", "books-text"]) == 1


def test_a_step_of_a_mix_can_be_blamed_and_computed_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--bitwise", "--save_every", "6", "--keep_checkpoints", "9") == 0
    capsys.readouterr()
    assert run_command(["replay", "run", "--step", "8"]) == 0
    assert "same bits" in capsys.readouterr().out
    assert run_command(["blame", "run", "--step", "8", "--losses", "--decode"]) == 0
    shown = capsys.readouterr().out
    assert "books: books-text/books" in shown and "code: code-text/code" in shown
    recorded = next(record["loss"] for record in records("run") if record["step"] == 8)
    assert f"loss {recorded:.4f} computed again, {recorded:.4f} recorded" in shown
    assert run_command(["blame", "run", "--step", "8", "--exclude", "1"]) == 1


def test_evaluate_shows_every_source(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--eval_tasks", "builtin") == 0
    assert all("next_word_accuracy" in record for record in records("run") if "valid_loss" in record)
    capsys.readouterr()
    assert run_command(["evaluate", "run"]) == 0
    shown = capsys.readouterr().out
    assert "  books: loss " in shown and "  code: loss " in shown


def test_a_source_without_validation_data_is_said_and_left_out_of_the_mean(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("run", "--train_data_path", "whole:1,code:1") == 0
    assert "no validation data of whole" in capsys.readouterr().out
    (last,) = [record for record in records("run") if "valid_loss" in record and record["step"] == STEPS]
    assert last["valid_loss"] == last["valid_loss/code"] and "valid_loss/whole" not in last


def test_a_custom_model_trains_on_a_mix_without_losses_of_sources(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(here)
    assert train("run", "--model", "mixed_models:Plain", "--doctor", "off", "--optimizer", "adamw") == 0
    assert all(step.keys() == {"loss"} for step in losses("run"))
    assert capsys.readouterr().out.count("the loss of each source is not known") == 1


def test_a_mix_in_float16_has_nearly_the_losses_of_one_in_float32(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classic = ("--recipe", "classic", "--doctor", "off")
    assert train("full", *classic) == 0
    assert train("half", *classic, "--dtype", "float16") == 0
    for full, half in zip(losses("full"), losses("half"), strict=True):
        assert half.keys() == full.keys() and half == pytest.approx(full, rel=2e-2)
    assert any(len(step) == 3 for step in losses("half")) and losses("half") != losses("full")
    assert "is not known" not in capsys.readouterr().out


def test_a_source_that_is_repeated_often_is_warned_of(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--context", "64", "--total_steps", "45", "--train_data_path", "books:0.9,code:0.1") == 0
    shown = capsys.readouterr().out
    assert "warning: repeated often: books " in shown and "% of the run: " in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train_data_path books:1,nowhere:1", ["nowhere", "does not exist", "drumline prepare"]),
        ("--train_data_path books:1,code-text:1", ["code-text is no prepared folder", "--tokenizer"]),
        ("--train_data_path books:1,chats:1", ["chats has conversations"]),
        ("--train_data_path books:1,code:1 --format chat", ["--format chat is for one source"]),
        ("--train_data_path books:1,code:1 --skip_list list.json", ["--skip_list list.json is for one folder"]),
        ("--train_data_path books:1,code:0.0001", ["code would be 0.0001 of the mix"]),
        ("--train_data_path books:1epoch,code:1 --stages 1-code:1", ["does not say from which step"]),
        ("--train_data_path books:9epochs,code:1", ["nothing is left"]),
        ("--train_data_path books --stages 1-", ["is for a mix, and books is one source"]),
        ("--train_data_path books:1,code:1 --context 100000", ["too few for one sequence"]),
    ],
)
def test_a_mix_that_cannot_be_trained_on_is_refused_with_two_lines(
    here: Path, capsys: pytest.CaptureFixture[str], flags: str, words: list[str]
) -> None:
    assert train("run", *flags.split()) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words) and error.count("\n") == 2, error
    assert not Path("run", "checkpoints").exists()


def test_different_tokenizers_are_refused_with_both_hashes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("run", "--train_data_path", "books:1,other:1") == 1
    error = capsys.readouterr().err
    for name in ("books", "other"):
        sha = json.loads(Path(name, "manifest.json").read_text())["tokenizer_sha256"]
        assert f"{sha}" in error


def test_other_weights_are_refused_on_resume_and_folders_may_move(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train("run", "--total_steps", "4") == 0
    longer = ["--total_steps", "6", "--allow_change", "total_steps"]
    assert run_command(["train", "--run_dir", "run", "--train_data_path", "books:0.5,code:0.5", *longer]) == 1
    assert "train_data_path books:0.6,code:0.4 -> books:0.5,code:0.5" in capsys.readouterr().err
    Path("moved").mkdir()
    Path("books").rename("moved/books")
    moved = "code:4,moved/books:6"
    assert run_command(["train", "--run_dir", "run", "--train_data_path", moved, *longer]) == 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")  # relative paths are of where the run was started
    later = ["--total_steps", "8", "--allow_change", "total_steps", "--stages", "6- code:1", "--allow_change", "stages"]
    assert run_command(["train", "--run_dir", "../run", *later]) == 0
    assert [step.keys() for step in losses("../run")[6:]] == [{"loss", "loss/code"}] * 2


@pytest.mark.parametrize("flags", [["--dry_run"], ["--dry_run", "--stages", "50%- code:1"]])
def test_a_dry_run_shows_the_mix(here: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert train("run", *flags) == 0
    shown = capsys.readouterr()
    assert 'train_data_path = "books:0.6,code:0.4"' in shown.out and "mix    books" in shown.err
    assert not Path("run").exists()


def test_a_mix_can_mask_documents_and_begin_with_short_contexts(here: Path) -> None:
    assert train("run", "--document_mask", "--short_contexts", "0.5", "--recipe", "portable") == 0
    assert all(len(step) >= 2 for step in losses("run"))
