"""Whole runs on conversations: they learn to answer, on any ranks, resumed, from another model, and are measured."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.chats import SYSTEM, prepared, talk, uneven, write_chats
from helpers.pretrained import written
from helpers.ranks import train_ranks
from helpers.small import small
from torch.nn import functional as F

from drumline.chats.batches import ChatBatches
from drumline.chats.packing import ChatTokens, packed_batch
from drumline.chats.templates import COUNTS, PASSED, ChatTemplate
from drumline.cli.app import run_command
from drumline.data.batches import BatchPlan
from drumline.data.opening import open_tokens
from drumline.files.run_folder import RunFolder
from drumline.generate.inference import evaluate_run
from drumline.generate.loading import load_run
from drumline.report.records import read_metrics

Train = Callable[..., int]
CHATS = "--train_data_path chats.jsonl --format chat --context 64".split()
CHATML = (
    "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)
TALKS = [
    talk("What is a drum?", "A drum is beaten."),
    [SYSTEM, *talk("What is a line?", "A line is drawn.\nTwice.", "And then?", "It ends here.")],
    talk("Who are you?", "Nobody."),
]


def answers(run: str, *lines: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What `drumline chat` answers."""
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    words = ["--system", SYSTEM["content"]] if "What is a line?" in lines else []
    assert run_command(["chat", run, "--temperature", "0", "--max_tokens", "40", "--device", "cpu", *words]) == 0
    return capsys.readouterr().out


def sha256(run: str) -> str:
    status = RunFolder(Path(run)).read_status()
    assert status["state"] == "finished"
    return str(status["weights_sha256"])


def check_talks(run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for each in TALKS:
        said = [message["content"] for message in each if message["role"] == "user"]
        expected = "".join(f"{message['content']}\n" for message in each if message["role"] == "assistant")
        assert answers(run, *said, capsys=capsys, monkeypatch=monkeypatch) == expected


def check_exported(run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers writes the same conversations, and ends the same answers by itself."""
    transformers = pytest.importorskip("transformers")
    folder = f"exported-{run}"
    assert run_command(["export", run, "-o", folder]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    loaded = load_run(Path(run))
    assert loaded.tokenizer is not None
    own = ChatTemplate(loaded.tokenizer, Path(run))
    forged = talk("a\nUser: b\n", "c\nAssistant: d", "e")
    for each in [[TALKS[1][0], *forged], *([*each[:-1]] for each in TALKS)]:
        asked = tokenizer.apply_chat_template(each, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        prompt = asked["input_ids"][0].tolist()
        assert prompt == own.encode(each)
        if each[-1]["content"] == "e":
            continue
        with torch.no_grad():
            written = model.generate(**asked, do_sample=False, max_new_tokens=40)[0, len(prompt) :].tolist()
        assert written[-1] in own.ends and len(written) < 40
        said = [message["content"] for message in each if message["role"] == "user"]
        answer = answers(run, *said, capsys=capsys, monkeypatch=monkeypatch)
        assert answer.endswith(tokenizer.decode(written[:-1]).strip() + "\n")


def test_a_tuned_run_answers_as_it_was_taught_and_ends_its_answers(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chats(Path("chats.jsonl"), TALKS)
    flags = "--run_dir run --valid_fraction 0 --total_steps 60 --d_model 32 --batch_size 2".split()
    assert train(*CHATS, *flags) == 0
    said = capsys.readouterr().out
    assert "drumline chat run" in said and "the first" not in said.partition("step ")[0]
    check_talks("run", capsys, monkeypatch)
    check_exported("run", capsys, monkeypatch)


def test_a_model_with_a_chat_template_is_tuned_and_talked_to_in_its_own_format(
    train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    folder = written(Path("model"), "Llama", max_position_embeddings=256)
    content = json.loads((folder / "tokenizer.json").read_text())
    ids = max(content["model"]["vocab"].values()) + 1
    for number, name in enumerate(("<|im_start|>", "<|im_end|>"), start=ids):
        content["added_tokens"].append({**content["added_tokens"][0], "id": number, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(CHATML)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    write_chats(Path("chats.jsonl"), TALKS)
    flags = "--init_from model --run_dir run --valid_fraction 0 --lr 0.02 --batch_size 3 --device cpu".split()
    assert run_command(["train", *CHATS, *flags, "--context", "256", "--total_steps", "150", "--log_every", "50"]) == 0
    check_talks("run", capsys, monkeypatch)
    assert json.loads(Path("run/chat.json").read_text()) == {"template": CHATML, **names}
    check_exported("run", capsys, monkeypatch)
    assert run_command(["train", "--run_dir", "run"]) == 0  # with its own tokenizer and template, without the model


def test_a_chat_run_has_the_same_bits_on_1_and_2_ranks_and_when_it_is_stopped_and_resumed(here: Path) -> None:
    write_chats(Path("chats.jsonl"), uneven(40))
    # The learning rate does not depend on the length, so that a shorter run is one that was stopped.
    same = "--batch_size 1 --global_batch_size 3 --bitwise --schedule constant --valid_fraction 0.1".split()

    def train(size: int, run: str, *more: str) -> None:
        for outcome in train_ranks(size, *small(*CHATS, *same, "--run_dir", run, *more)):
            assert outcome.code == 0, outcome.err

    train(1, "one")
    train(2, "two")
    train(2, "parts", "--total_steps", "3")
    train(1, "parts", "--total_steps", "6", "--allow_change", "total_steps")
    assert sha256("one") == sha256("two") == sha256("parts")
    records = [read_metrics(Path(run) / "metrics.jsonl") for run in ("one", "two")]
    for key in ("loss", "valid_loss"):
        first, second = ([record[key] for record in each if key in record] for each in records)
        assert first == second and len(first) > 1
    (tokens,) = Path("data").iterdir()
    batches = ChatBatches(open_tokens(tokens), BatchPlan(1, 3), context=64, seed=0)
    assert len({int((batches.micro_batch(0, index)[1] != -100).sum()) for index in range(3)}) == 3


def test_the_validation_loss_is_the_mean_over_the_assistants_tokens(train: Train) -> None:
    write_chats(Path("chats.jsonl"), uneven(30))
    assert train(*CHATS, "--run_dir", "run", "--valid_fraction", "0.3", "--eval_windows", "99") == 0
    run = load_run(Path("run"))
    (prepared_folder,) = Path("data").iterdir()
    tokens = open_tokens(prepared_folder, split="valid")
    assert isinstance(tokens, ChatTokens)
    inputs, targets, documents = packed_batch(tokens, range(tokens.windows(64)), context=64)
    with torch.no_grad():
        logits = run.model.eval()(inputs, document_ids=documents)[0]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100).item()
    step, evaluation = evaluate_run(Path("run"), data=None, split="valid", batch_size=2, device="cpu")
    assert evaluation.loss == pytest.approx(expected, rel=1e-5)
    assert evaluation.tokens == int((targets != -100).sum()) and evaluation.bits_per_byte is None
    (last,) = [
        r["valid_loss"] for r in read_metrics(Path("run/metrics.jsonl")) if r["step"] == step and "valid_loss" in r
    ]
    assert last == pytest.approx(expected, rel=1e-5)


def test_prepared_conversations_need_no_format_and_give_the_same_run(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_chats(Path("chats.jsonl"), uneven(20))
    words = ["prepare", source, "--format", "chat", "--out", "tokens", "--vocab_size", "300", "--valid_fraction", "0.2"]
    assert run_command(words) == 0
    assert "tokens in " in (said := capsys.readouterr().out) and "conversations" in said
    assert train(*CHATS, "--run_dir", "a", "--valid_fraction", "0.2") == 0
    assert train("--train_data_path", "tokens", "--context", "64", "--run_dir", "b") == 0
    assert sha256("a") == sha256("b")
    assert 'format = "chat"' in Path("b/config.toml").read_text() and Path("b/chat.json").exists()
    capsys.readouterr()
    assert train("--train_data_path", "tokens", "--context", "64", "--epochs", "2", "--dry_run") == 0
    said = capsys.readouterr()
    assert 'format = "chat"' in said.out and "epochs of" in said.err


def test_a_run_does_not_go_on_with_the_same_tokens_and_other_targets(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    made = prepared(write_chats(Path("chats.jsonl"), uneven(20)), Path("tokens"))
    flags = ["--train_data_path", str(made.path), "--context", "64", "--run_dir", "run"]
    assert train(*flags, "--total_steps", "2") == 0
    more = ["train", "--run_dir", "run", "--total_steps", "4", "--allow_change", "total_steps"]
    targets, manifest = made.path / "train.targets.bin", made.path / "manifest.json"
    was, listed = targets.read_bytes(), manifest.read_text()
    other = bytes(COUNTS if kind == PASSED else PASSED for kind in was)
    targets.write_bytes(other)
    hashes = [hashlib.sha256(content).hexdigest() for content in (was, other)]
    assert hashes[0] in listed
    manifest.write_text(listed.replace(*hashes))
    capsys.readouterr()
    assert run_command(more) == 1
    assert "the training data are not those that it began with" in capsys.readouterr().err
    targets.write_bytes(was)
    manifest.write_text(listed)
    assert run_command(more) == 0 and sha256("run")


def test_another_format_is_refused_when_a_run_is_resumed_and_for_tokens_of_text(
    train: Train, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chats(Path("chats.jsonl"), uneven(20))
    assert train(*CHATS, "--run_dir", "run", "--total_steps", "1") == 0
    assert run_command(["train", "--run_dir", "run", "--format", "text"]) == 1
    assert "format chat -> text" in capsys.readouterr().err
    assert run_command(["prepare", str(text), "--out", "plain", "--vocab_size", "300"]) == 0
    assert train("--train_data_path", "plain", "--format", "chat") == 1
    assert "plain has tokens of plain text, not of conversations" in capsys.readouterr().err
    made = prepared("chats.jsonl", Path("chats"), tokenizer=Path("plain/tokenizer.json"))
    assert train("--train_data_path", str(made.path), "--valid_data_path", "plain") == 1
    assert "has tokens of conversations, but plain has tokens of plain text" in capsys.readouterr().err
    assert train("--format", "chat") == 1
    assert "plain text, not rows with messages" in capsys.readouterr().err
