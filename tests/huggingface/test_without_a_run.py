"""The folder of a Hugging Face model is sampled from, talked to and evaluated as a run of it is."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.pretrained import written
from helpers.stories import write_stories

from drumline.chats.templates import ChatTemplate
from drumline.cli.app import run_command
from drumline.generate.inference import writing_run

transformers = pytest.importorskip("transformers")
GREEDY = "--temperature 0 --max_tokens 12 --device cpu".split()


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Qwen3"])
def test_a_folder_writes_what_a_run_of_it_and_transformers_write(
    here: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(here / "model", name)
    before = files_of(folder)
    assert run_command(["import", "model", "-o", "run"]) == 0

    def said(path: str) -> list[str]:
        capsys.readouterr()
        assert run_command(["sample", path, "--prompt", "the drum", *GREEDY]) == 0
        monkeypatch.setattr("sys.stdin", io.StringIO("the line\n"))
        assert run_command(["chat", path, *GREEDY]) == 0
        return capsys.readouterr().out.splitlines()

    assert said("model") == said("run") and files_of(folder) == before
    loaded = writing_run(folder, device="cpu")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    ids = tokenizer("the drum", return_tensors="pt")["input_ids"]
    logits = model(input_ids=ids).logits[0, -1, : loaded.tokenizer.vocab_size]
    assert said("model")[0].startswith("the drum" + loaded.tokenizer.decode([int(logits.argmax())]))


def test_a_folder_is_talked_to_by_its_template(here: Path) -> None:
    folder = written(here / "model", "Llama")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    loaded = writing_run(folder, device="cpu")
    ids = ChatTemplate(loaded.tokenizer, loaded.folder.path).encode([{"role": "user", "content": "the"}])
    assert loaded.tokenizer.decode(ids) == "[the]"


def test_a_folder_is_evaluated_on_text_that_is_given(
    here: Path, capsys: pytest.CaptureFixture[str], train: Callable[..., int]
) -> None:
    folder = written(here / "model", "Llama", max_position_embeddings=32)
    before = files_of(folder)
    write_stories(here / "stories")
    for words in (["evaluate", "model"], ["evaluate", "model", "--tasks", "builtin"]):
        capsys.readouterr()
        assert run_command(words) == 1
        error = capsys.readouterr().err.strip().splitlines()
        assert error[0] == "error: model is a model without a run, so it has no held-out text"
        assert "--data FOLDER" in error[1] and "--tokenizer model/tokenizer.json" in error[1] and len(error) == 2
    prepare = [
        "prepare",
        "stories",
        "--out",
        "tokens",
        "--tokenizer",
        "model/tokenizer.json",
        "--valid_fraction",
        "0.5",
    ]
    assert run_command(prepare) == 0
    assert run_command(["import", "model", "-o", "run"]) == 0
    for more in ([], ["--tasks", "builtin", "--limit", "10"]):
        printed = []
        for path in ("model", "run"):
            capsys.readouterr()
            assert run_command(["evaluate", path, "--data", "tokens", "--device", "cpu", *more]) == 0
            printed.append(re.findall(r"\d+\.\d{4}", capsys.readouterr().out))
        assert printed[0] == printed[1] and len(printed[0]) >= 2
    assert files_of(folder) == before
    assert list(json.loads(next((here / "run/evals").iterdir()).read_text())["tasks"])


def test_a_folder_that_cannot_be_used_is_refused_in_two_lines(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(here / "model", "Llama")
    (folder / "tokenizer.json").rename(here / "tokenizer.json")
    capsys.readouterr()
    assert run_command(["sample", "model"]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert "has no tokenizer.json" in said[0] and len(said) == 2
    (here / "tokenizer.json").rename(folder / "tokenizer.json")
    (folder / "model.safetensors").unlink()
    assert run_command(["sample", "model"]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert "no model.safetensors" in said[0] and len(said) == 2
